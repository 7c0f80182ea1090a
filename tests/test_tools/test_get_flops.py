"""The table of what the parts of a model cost."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "analysis_tools" / "get_flops.py"
DETECTOR = ROOT / "configs" / "quickstart" / "mask-rcnn_spectral-swin-d48_fpn_shapes.py"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["get_flops.py", *map(str, arguments)])
        runpy.run_path(str(SCRIPT))["main"]()
        return capsys.readouterr().out

    return run


def parts(printed):
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    assert rows[0] == ["part", "parameters (M)", "FLOPs (G multiply-adds)", "activations (M)"]
    return {name: list(map(float, counts)) for name, *counts in rows[2:]}


def test_parts_of_a_detector_on_a_padded_image(run):
    printed = run(DETECTOR, "--shape", 100, 120)
    assert "Input 1 x 3 x 128 x 128, from an image of 100 x 120\n" in printed
    table = parts(printed)
    assert list(table) == ["backbone", "neck", "rpn_head", "roi_head", "total"]
    *counts, total = zip(*table.values(), strict=True), list(table.values())[-1]
    for column, of_all in zip(*counts, total, strict=True):
        assert min(column) > 0
        assert sum(column[:-1]) == pytest.approx(of_all, abs=0.003)
    assert "aten::softmax" in printed.splitlines()[-1]


def test_a_classifier_has_224_pixels_and_its_attention(run, toy_config, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(toy_config).parent))
    printed = run(toy_config, "--cfg-options", "model.backbone.img_size=224")
    assert "Input 1 x 3 x 224 x 224, from an image of 224 x 224\n" in printed
    assert list(parts(printed)) == ["backbone", "head", "total"]
    assert "scaled_dot_product_attention 0.001" in printed  # 2 * 197^2 * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([DETECTOR, "--shape", 1, 2, 3], "--shape takes one side of a square or H and W"),
        ([DETECTOR, "--shape", 0], "at least 1, got [0]"),
        (["missing.py"], "There is no config missing.py"),
    ],
)
def test_what_cannot_be_counted_is_refused(run, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err

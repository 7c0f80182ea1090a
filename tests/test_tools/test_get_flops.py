"""The table of what the parts of a model cost."""

from pathlib import Path

import pytest

from tests.helpers import CONFIGS

TOOL = "analysis_tools/get_flops.py"
DETECTOR = CONFIGS / "quickstart" / "mask-rcnn_spectral-swin-d48_fpn_shapes.py"


def parts(printed):
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    assert rows[0] == ["part", "parameters (M)", "FLOPs (G multiply-adds)", "activations (M)"]
    return {name: list(map(float, counts)) for name, *counts in rows[2:]}


def test_parts_of_a_detector_on_a_padded_image(call_tool):
    _, printed, _ = call_tool(TOOL, DETECTOR, "--shape", 100, 120)
    assert "Input 1 x 3 x 128 x 128, from an image of 100 x 120\n" in printed
    table = parts(printed)
    assert list(table) == ["backbone", "neck", "rpn_head", "roi_head", "total"]
    *counts, total = zip(*table.values(), strict=True), list(table.values())[-1]
    for column, of_all in zip(*counts, total, strict=True):
        assert min(column) > 0
        assert sum(column[:-1]) == pytest.approx(of_all, abs=0.003)
    assert "aten::softmax" in printed.splitlines()[-1]


def test_a_classifier_has_224_pixels_and_its_attention(call_tool, toy_config, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(toy_config).parent))
    _, printed, _ = call_tool(TOOL, toy_config, "--cfg-options", "model.backbone.img_size=224")
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
def test_what_cannot_be_counted_is_refused(call_tool, arguments, message):
    status, _, errors = call_tool(TOOL, *arguments)
    assert status == 2 and message in errors

"""Summaries and comparisons of finished runs, on a run of two iterations of the quick-start model."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import cv2
import pytest
import torch
from mmengine.registry import DefaultScope

from mmspectral.analysis import last_metrics
from tests.helpers import TOOLS, Call

SUMMARY, COMPARISON = (
    runpy.run_path(str(TOOLS / name)) for name in ("misc/summarize_run.py", "analysis_tools/compare_runs.py")
)


@pytest.fixture
def run(trained_quickstart, tmp_path):
    """A copy of the folder, since the summary is written into it."""
    return shutil.copytree(trained_quickstart, tmp_path / "spectral-seed3")


def test_summary_holds_metrics_versions_and_pictures(run):
    with DefaultScope.overwrite_default_scope("mmpretrain"):  # found and left as it is
        summary = SUMMARY["summarize_run"](run, 3, 0.0, {"train_seconds": 1.5, "setup_seconds": 0})
        assert DefaultScope.get_current_instance().scope_name == "mmpretrain"
    assert summary == json.loads((run / "summary.json").read_text())
    assert {"coco/bbox_mAP", "coco/segm_mAP", "train_seconds", "setup_seconds", "versions"} <= set(summary)
    assert "torch" in summary["versions"] and "mmspectral" in summary["versions"]
    assert Path(summary["checkpoint"]).name == "epoch_1.pth"
    for name in ("predictions.png", "conditioning.png"):
        assert cv2.imread(str(run / name)).std() > 5


def hostile(path):
    torch.save(dict(state_dict={}, meta=Call(Path("ran").touch)), path)


def of_another_model(path):
    torch.save(dict(state_dict={"fc.weight": torch.zeros(3)}), path)


def without_the_head(path):
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["state_dict"]["roi_head.bbox_head.fc_cls.weight"]
    torch.save(checkpoint, path)


LOG, CHECKPOINT, CONFIG = "*/vis_data/scalars.json", "epoch_1.pth", "*.py"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (LOG, lambda path: path.write_text(""), "no log with a validation"),
        (
            LOG,
            lambda path: path.write_bytes(b'\xff\x00[1, 2]\n{"coco/bbox_mAP": "0.5", "step": 1}'),
            "no log with a val",
        ),
        (CHECKPOINT, Path.unlink, "no checkpoint"),
        (CHECKPOINT, lambda path: path.rename(path.with_name("epoch_last.pth")), "no checkpoint"),
        (CHECKPOINT, lambda path: (path.unlink(), path.mkdir()), "no checkpoint"),
        (CHECKPOINT, lambda path: path.write_bytes(path.read_bytes()[:5000]), "epoch_1.pth"),
        (CHECKPOINT, hostile, "epoch_1.pth"),
        (CHECKPOINT, of_another_model, "matched 0 of"),
        (CHECKPOINT, without_the_head, "lacks roi_head.bbox_head.fc_cls.weight"),
        (CONFIG, Path.unlink, "holds no config"),
        (CONFIG, lambda path: path.write_text("model = dict("), "is no config of a model"),
        (CONFIG, lambda path: path.write_text("x = 1"), "is no config of a model"),
    ],
)
def test_what_is_wrong_in_a_folder_is_one_line(run, monkeypatch, capsys, loaders, file, damage, message):
    tool = SUMMARY if file is CONFIG or damage is hostile else COMPARISON
    monkeypatch.chdir(run.parent)
    for path in run.glob(file):
        damage(path)
    monkeypatch.setattr(sys, "argv", ["tool.py", str(run)])
    with pytest.raises(SystemExit) as stopped:
        tool["main"]()
    errors = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and message in errors[-1] and len(errors) < 3
    assert not Path("ran").exists()


def test_the_last_line_of_a_log_may_be_torn(run):
    (log,) = run.glob(LOG)
    before = last_metrics(run)
    log.write_text(log.read_text() + '{"coco/bbox_mAP": 0.9, "coc')
    assert last_metrics(run) == before


def test_comparison_reads_a_run(run):
    read = COMPARISON["read_run"](run)
    assert (read.group, read.seed) == ("spectral", 3)
    assert 0 <= read.box_ap <= 1 and 0 <= read.mask_ap <= 1
    assert 1 < read.kappa_start < 1.4, "lambda = 10 against weights of std 0.02"
    assert 1 < read.kappa_end < 1.4 and read.kappa_end != read.kappa_start


def test_comparison_gives_mean_and_range_of_each_group():
    Run = COMPARISON["Run"]
    runs = [
        Run("stock", 1, 0.2, 0.4, 900.0, 1000.0),
        Run("ours", 0, 0.5, 0.5, 1.1, 1.2),
        Run("stock", 0, 0.4, 0.5, 700.0, 3000.0),
    ]
    table = COMPARISON["comparison_table"](runs).splitlines()
    assert table[2] == (
        "| stock | 0, 1 | 0.300 (0.200 to 0.400) | 0.450 (0.400 to 0.500) | 800 (700 to 900) | 2000 (1000 to 3000) |"
    )
    assert table[3].startswith("| ours | 0 | 0.500 (0.500 to 0.500)")


@pytest.mark.parametrize(("name", "message"), [("run", "-seedN"), ("none-seed1", "no folder")])
def test_folders_that_are_no_run_are_refused(tmp_path, monkeypatch, capsys, name, message):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(tmp_path / name)])
    with pytest.raises(SystemExit):
        COMPARISON["main"]()
    assert message in capsys.readouterr().err

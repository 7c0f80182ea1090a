"""Summaries and comparisons of finished runs, on a run of two iterations of the quick-start model."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import cv2
import pytest
from mmengine.registry import DefaultScope

from mmspectral.analysis import last_metrics

TOOLS = Path(__file__).resolve().parents[2] / "tools"
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


def test_unfinished_runs_are_named(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no config"):
        SUMMARY["summarize_run"](tmp_path / "empty", 1, 0.5, {})
    (run / "epoch_1.pth").unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        SUMMARY["summarize_run"](run, 1, 0.5, {})
    for log in run.glob("*/vis_data/scalars.json"):
        log.write_text("")
    with pytest.raises(FileNotFoundError, match="no log with a validation"):
        last_metrics(run)


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

"""The summary of a run, on a run of two iterations of the quick-start model."""

import json
from pathlib import Path

import cv2
import pytest
from mmengine.registry import DefaultScope

from mmspectral.analysis.run_summary import last_metrics, summarize_run, versions


@pytest.fixture
def run(trained_quickstart, tmp_path):
    """A copy of the folder, since the summary is written into it."""
    for path in trained_quickstart.rglob("*"):
        target = tmp_path / path.relative_to(trained_quickstart)
        target.mkdir(exist_ok=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    return tmp_path


def test_summary_holds_metrics_versions_and_pictures(run):
    with DefaultScope.overwrite_default_scope("mmpretrain"):  # found and left as it is
        summary = summarize_run(run, num_images=3, score_thr=0.0, extra={"train_seconds": 1.5, "setup_seconds": 0})
        assert DefaultScope.get_current_instance().scope_name == "mmpretrain"
    assert summary == json.loads((run / "summary.json").read_text())
    assert {"coco/bbox_mAP", "coco/segm_mAP", "train_seconds", "setup_seconds", "versions"} <= set(summary)
    assert summary["versions"]["torch"] and summary["versions"] == versions()
    assert Path(summary["checkpoint"]).name == "epoch_1.pth"
    for name in ("predictions.png", "conditioning.png"):
        assert cv2.imread(str(run / name)).std() > 5


def test_unfinished_runs_are_named(run, tmp_path_factory):
    with pytest.raises(FileNotFoundError, match="holds no config"):
        summarize_run(tmp_path_factory.mktemp("empty"), 1, 0.5, {})
    (run / "epoch_1.pth").unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        summarize_run(run, 1, 0.5, {})
    for log in run.glob("*/vis_data/scalars.json"):
        log.write_text("")
    with pytest.raises(FileNotFoundError, match="no log with a validation"):
        last_metrics(run)

"""check_dataset.py, and train.py that runs the same check."""

import runpy
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def run(toy_config, tmp_path, monkeypatch, capsys, loaders):
    """Return a function that runs a tool on the toy classifier and returns its exit status and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(toy_config).parent)
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.delenv("LOCAL_RANK")

    def run(tool, *options):
        monkeypatch.setattr("sys.argv", [tool, toy_config, *options])
        try:
            runpy.run_path(str(TOOLS / tool), run_name="__main__")
        except SystemExit as stop:
            return stop.code, capsys.readouterr()
        return 0, capsys.readouterr()

    return run


WRONG = ["--cfg-options", "model.head.num_classes=3"]


def test_table_and_exit_status(run):
    status, printed = run("misc/check_dataset.py")
    assert status == 0
    assert "| classes | 2     | 2   |" in printed.out
    status, printed = run("misc/check_dataset.py", *WRONG)
    assert status == 1
    assert "error: model.head.num_classes is for 3 classes, but the dataset has 2 (dark, bright)" in printed.out


def test_training_is_refused_before_anything_is_written(run, tmp_path):
    status, printed = run("train.py", *WRONG)
    assert status == 2
    assert "train.py: error: The data cannot be used with this config" in printed.err and "error: " not in printed.out
    assert "- model.head.num_classes is for 3 classes" in printed.err
    assert not any(tmp_path.iterdir())

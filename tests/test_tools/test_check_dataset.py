"""check_dataset.py, and train.py that runs the same check."""

import pytest

from tests.helpers import TOY

WRONG = (TOY / "config.py", "--cfg-options", "model.head.num_classes=3")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.delenv("LOCAL_RANK")


def test_table_and_exit_status(call_tool):
    status, out, _ = call_tool("misc/check_dataset.py", WRONG[0])
    assert status == 0 and "| classes | 2     | 2   |" in out
    status, out, _ = call_tool("misc/check_dataset.py", *WRONG)
    assert status == 1
    assert "error: model.head.num_classes is for 3 classes, but the dataset has 2 (dark, bright)" in out


def test_training_is_refused_before_anything_is_written(call_tool, tmp_path):
    status, out, errors = call_tool("train.py", *WRONG)
    assert status == 2
    assert "train.py: error: The data cannot be used with this config" in errors
    assert "- model.head.num_classes is for 3" in errors and "error: " not in out
    assert not any(tmp_path.iterdir())

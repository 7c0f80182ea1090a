"""Folders in the working directory that are named as the packages do not take their place."""

import sys

import pytest

from tests.helpers import QUICKSTART, ROOT, TOOLS, output_of


@pytest.mark.parametrize(
    ("packages", "path"),
    [
        pytest.param(True, [ROOT], id="packages"),
        # The empty entry of a path stands for the working directory.
        pytest.param(False, ["", ROOT], id="folders, working directory on the path", marks=pytest.mark.slow),
    ],
)
def test_a_tool_runs_beside_foreign_folders(tmp_path, packages, path):
    for name in ("mmspectral", "mmdet", "mmengine"):
        (tmp_path / name).mkdir()
        if packages:
            (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a foreign package')")
    output = output_of(sys.executable, TOOLS / "misc" / "check_dataset.py", QUICKSTART, cwd=tmp_path, path=path)
    assert "| classes | 4     | 4   |" in output

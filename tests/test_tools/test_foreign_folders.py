"""Folders in the working directory that are named as the packages do not take their place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("packages", "path"),
    [
        pytest.param(True, [ROOT], id="packages"),
        # The empty entry of a path stands for the working directory.
        pytest.param(False, ["", ROOT], id="folders, working directory on the path", marks=pytest.mark.slow),
    ],
)
def test_a_tool_runs_beside_foreign_folders(quickstart_config, tmp_path, packages, path):
    for name in ("mmspectral", "mmdet", "mmengine"):
        (tmp_path / name).mkdir()
        if packages:
            (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a foreign package')")
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "misc" / "check_dataset.py", quickstart_config],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, path)), CUDA_VISIBLE_DEVICES="-1"),
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| classes | 4     | 4   |" in result.stdout

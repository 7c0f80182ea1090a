"""The command lines on a toy classifier."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "data" / "toy_classification"


@pytest.fixture(scope="session")
def toy_config():
    return str(TOY / "config.py")


@pytest.fixture(scope="session")
def run_tool():
    """Return a function that runs ``tools/NAME`` with arguments, in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(TOY), os.environ.get("PYTHONPATH", "")])
    # Nothing of an earlier test or of a launcher may leak in.
    names = ("LOCAL_RANK", "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment.update(PYTHONPATH=path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="-1")

    def run(name, *arguments, cwd=None):
        command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=200)

    return run


@pytest.fixture(scope="session")
def trained(run_tool, toy_config, tmp_path_factory):
    """The work folder of two iterations with ``--amp``, and what the run printed."""
    folder = tmp_path_factory.mktemp("trained")
    result = run_tool("train.py", toy_config, "--work-dir", folder, "--amp")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout + result.stderr

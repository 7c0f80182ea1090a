import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmspectral.compat import mmcv_ops_backend, torchvision_ops

ROOT = Path(__file__).resolve().parents[2]
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request):
    return request.param


@pytest.fixture(params=["torchvision", "compiled"])
def operators(request):
    """Both implementations, where there are two, answer to the same reference."""
    if request.param == "torchvision":
        return torchvision_ops
    if mmcv_ops_backend() != "compiled":
        pytest.skip("this mmcv has no compiled operators")
    return importlib.import_module("mmcv._ext")


@pytest.fixture
def fresh_process(tmp_path):
    """Run code in a new interpreter and return what it printed; ``folders`` come first on its path."""

    def run(code, *folders, python=sys.executable, arguments=("-c",)):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT])), "OMP_NUM_THREADS": "1"}
        command = [python, *arguments, *([code] if code else [])]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)

    return run

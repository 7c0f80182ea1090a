import importlib

import pytest
import torch

from mmspectral.compat import mmcv_ops_backend, torchvision_ops

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
def fake_mmcv(tmp_path):
    """An mmcv without anything in it; tests put a ``_ext`` beside its ``__init__.py``."""
    package = tmp_path / "site" / "mmcv"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return package

"""The start-up file in a virtual environment of its own: there, nobody imports mmspectral first."""

import inspect
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from mmspectral.compat import __main__ as command_line
from mmspectral.compat import mmcv_ops_backend
from tests.helpers import run

COMPAT = ("-m", "mmspectral.compat")


@pytest.fixture
def environment(tmp_path):
    """Folder of a bare virtual environment without pip."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=os.name != "nt")
    return tmp_path / "env"


@pytest.fixture
def python(environment):
    return str(environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


@pytest.fixture
def site_packages(python):
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-c", code], text=True).strip())


@pytest.fixture
def fake_mmcv(tmp_path):
    package = tmp_path / "fake" / "mmcv"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return package.parent


def train_and_predict():
    """Run mmdet's Mask R-CNN on a small image with random weights."""
    import mmdet.models  # noqa: F401  registers what the config names
    import mmpretrain.models  # noqa: F401  as users of its backbones do
    import numpy as np
    import torch
    from mmdet.registry import MODELS
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.hub import get_config
    from mmengine.registry import init_default_scope
    from mmengine.structures import InstanceData

    torch.manual_seed(0)
    init_default_scope("mmdet")
    config = get_config("mmdet::_base_/models/mask-rcnn_r50_fpn.py").model
    config.backbone.init_cfg = None
    config.roi_head.bbox_head.num_classes = config.roi_head.mask_head.num_classes = 3
    model = MODELS.build(config)
    sample = DetDataSample(metainfo=dict(img_shape=(64, 96), ori_shape=(64, 96), scale_factor=(1.0, 1.0)))
    masks = np.zeros((1, 64, 96), dtype=np.uint8)
    masks[0, 10:40, 20:70] = 1
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[20.0, 10.0, 70.0, 40.0]]), labels=torch.tensor([1]), masks=BitmapMasks(masks, 64, 96)
    )
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    batch = model.data_preprocessor(dict(inputs=[image], data_samples=[sample]), training=True)
    total, losses = model.parse_losses(model(**batch, mode="loss"))
    total.backward()
    assert {"loss_rpn_cls", "loss_bbox", "loss_mask"} <= losses.keys() and torch.isfinite(total)
    # RoIAlign is the only way from the mask head to the neck.
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.startswith(("neck.fpn_convs.0", "roi_head.mask_head.convs.0")):
            assert parameter.grad.abs().sum() > 0, name
    with torch.no_grad():
        batch = model.eval().data_preprocessor(dict(inputs=[image], data_samples=[sample]))
        instances = model(**batch, mode="predict")[0].pred_instances
    assert 0 < len(instances) <= 100 and instances.masks.shape[1:] == (64, 96)


def test_mask_rcnn_after_importing_mmspectral():
    train_and_predict()


def test_mask_rcnn_where_nobody_imports_mmspectral(fresh_process, python, site_packages):
    (site_packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    assert fresh_process("", python=python, arguments=(*COMPAT, "install")).returncode == 0
    code = "import sys\nassert not {'mmspectral', 'torch'} & set(sys.modules)\n"
    code += (
        f"{inspect.getsource(train_and_predict)}\ntrain_and_predict()\nprint('trained', 'mmspectral' in sys.modules)"
    )
    result = fresh_process(code, python=python)
    asked = mmcv_ops_backend() == "torchvision"  # a compiled extension needs no stand-in
    assert result.stdout.strip().endswith(f"trained {asked}"), result.stderr


def test_install_status_uninstall(fresh_process, python, site_packages, fake_mmcv):
    file = site_packages / "mmspectral_compat.pth"

    def run(command):
        result = fresh_process("", fake_mmcv, python=python, arguments=(*COMPAT, command))
        return result.returncode, result.stdout + result.stderr

    # No torchvision in this environment, so nobody serves the operators.
    assert run("status") == (1, "mmcv's operators: missing\nstart-up file: none\n")
    code, text = run("install")
    assert code == 0 and text.startswith(f"wrote {file}")
    assert run("install") == (0, text)
    assert [p.name for p in site_packages.iterdir() if "mmspectral" in p.name] == [file.name]
    assert len(file.read_text().splitlines()) == 1
    assert run("status") == (1, f"mmcv's operators: missing\nstart-up file: {file}\n")
    assert run("uninstall") == (0, f"removed {file}\n")
    assert run("uninstall") == (0, f"there was no {file}\n")
    assert not file.exists()


def test_status_of_this_environment(capsys):
    assert command_line.main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[0] in (f"mmcv's operators: {b}" for b in ("compiled", "torchvision"))


def test_start_up_file_beside_the_finder_of_the_package(fresh_process, python, site_packages, fake_mmcv):
    command_line.install(site_packages / command_line.FILE_NAME)
    (site_packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    code = "import sys, mmspectral, mmcv._ext\nprint(mmcv._ext.__spec__.origin)\n"
    code += "print([type(f).__name__ for f in sys.meta_path if f.find_spec('mmcv._ext', [])])"
    result = fresh_process(code, fake_mmcv, python=python)
    finders = "['MmspectralCompat', 'TorchvisionExtensionFinder']"
    assert result.stdout.splitlines() == ["mmspectral.compat.torchvision_ops", finders], result.stderr


def test_python_works_after_mmspectral_is_gone(python, site_packages, fake_mmcv):
    command_line.install(site_packages / command_line.FILE_NAME)
    code = "import json, mmcv\nprint('works')\nimport mmcv._ext"
    result = run(python, "-c", code, cwd=fake_mmcv, PYTHONPATH=fake_mmcv)
    # Python reports trouble with a start-up file on stderr before it runs the code.
    assert result.stdout.strip() == "works" and result.stderr.startswith("Traceback")
    assert result.stderr.strip().endswith("ModuleNotFoundError: No module named 'mmcv._ext'")


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / command_line.FILE_NAME
    file.write_text("old")

    def replace(self, target):
        raise PermissionError(13, "Permission denied")

    for place in (tmp_path / "none" / file.name, file):
        monkeypatch.setattr(command_line, "start_up_file", lambda place=place: place)
        assert command_line.main(["install"]) == 1
        assert capsys.readouterr().err.startswith(f"cannot install {place}: ")
        monkeypatch.setattr(Path, "replace", replace)
    assert [p.name for p in tmp_path.iterdir()] == [file.name] and file.read_text() == "old"

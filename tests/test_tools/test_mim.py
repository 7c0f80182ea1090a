"""mim starts mmdet's, mmpretrain's and our scripts on our configs."""

import importlib.metadata
import json
import os
import sys
import sysconfig
from importlib.util import find_spec

import pytest

from mmspectral.compat.environment import family_in_use
from tests.helpers import QUICKSTART, ROOT, TINY, TOY, output_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mim") is None, reason="needs openmim, or onedl-mim for the onedl packages"),
]
FORKS = family_in_use() == "onedl"
# The forks' mim knows packages by the names of their distributions.
MMDET, MMPRETRAIN = ("onedl-mmdetection", "onedl-mmpretrain") if FORKS else ("mmdet", "mmpretrain")
CLASSIFIER = f"""
_base_ = {str(TOY / "config.py")!r}
conditioning = dict(type="IdentityCorrection", scale=1.0)
model = dict(backbone=dict(type="mmspectral.SpectralViT", conditioning=conditioning))
# mmpretrain's script asks for workers that stay otherwise.
train_dataloader = val_dataloader = test_dataloader = dict(persistent_workers=False)
"""


def mim(*arguments, path=()):
    # It asks before it installs what it does not find, and gets no answer: pytest gives no input.
    path = os.pathsep.join(map(str, path))
    return output_of(sys.executable, "-W", "ignore", "-m", "mim", *arguments, cwd="/", PYTHONPATH=path)


@pytest.mark.parametrize("command", [("run", MMDET, "train"), ("train", MMDET)], ids=" ".join)
def test_mmdet_trains(command, tmp_path):
    options = ("--work-dir", tmp_path, "--cfg-options", *TINY)
    assert "coco/segm_mAP:" in mim(*command, QUICKSTART, *options, path=[ROOT])
    assert (tmp_path / "epoch_1.pth").is_file()


@pytest.mark.parametrize("command", [("run", MMPRETRAIN, "train"), ("train", MMPRETRAIN)], ids=" ".join)
def test_mmpretrain_trains(command, tmp_path):
    (tmp_path / "config.py").write_text(CLASSIFIER)
    assert "accuracy/top1:" in mim(*command, tmp_path / "config.py", "--work-dir", tmp_path, path=[ROOT, TOY])
    assert (tmp_path / "iter_2.pth").is_file()


def installed_editable():
    """Return whether mmspectral is installed as a link to its sources; None where it is not installed."""
    installed = importlib.metadata.distributions(name="mmspectral", path=[sysconfig.get_path("purelib")])
    for distribution in installed:
        return json.loads(distribution.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)


@pytest.mark.skipif(
    installed_editable() is not FORKS,
    reason="onedl-mim finds mmspectral where it is installed by `pip install -e`, openmim by `pip install` alone",
)
@pytest.mark.parametrize("command", [("run", "mmspectral", "train"), ("train", "mmspectral")], ids=" ".join)
def test_our_tools(command, tmp_path):
    output = mim(*command, QUICKSTART, "--work-dir", tmp_path, "--cfg-options", *TINY)
    assert "coco/segm_mAP:" in output and "validation_started_at:" in output  # a key of our own hook
    assert (tmp_path / "epoch_1.pth").is_file()

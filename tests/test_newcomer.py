"""The snippets of the main README, run in order from a checkout, with tiny settings in the place of long ones."""

import re
import shlex
import sys

import pytest
from mmdet.apis import init_detector
from mmengine.config import Config

import mmspectral
from tests.helpers import ROOT, TINY, coco_set, output_of

README = (ROOT / "README.md").read_text()
BLOCKS = {
    title: re.findall(r"^```(?:bash|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
}
OWN_DATA = (
    "train_cfg.max_epochs=1",
    "train_cfg.val_interval=1",
    "param_scheduler=[]",
    "train_dataloader.dataset.pipeline.2.scale=(64,64)",
    "val_dataloader.dataset.pipeline.1.scale=(64,64)",
    *(f"{part}_dataloader.num_workers=0" for part in ("train", "val", "test")),
    *(f"{part}_dataloader.persistent_workers=False" for part in ("train", "val", "test")),
)
PATH = ("Quick start", "Your own data", "Your own backbone", "timm, transformers, your `nn.Module`")


@pytest.fixture
def checkout(tmp_path):
    """A folder with the checkout's tools, configs and package, and no results of others."""
    for name in ("tools", "configs", "mmspectral", "setup.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    return tmp_path


def shell(checkout, script):
    return output_of("bash", "-ec", f'PATH="{checkout / "bin"}:$PATH"\n{script}', cwd=checkout)


def test_a_newcomers_path_is_short():
    lines = [line for title in PATH for block in BLOCKS[title] for line in block.splitlines() if line]
    assert len(lines) < 30


@pytest.mark.slow
def test_quick_start(checkout):
    command = BLOCKS["Quick start"][0].splitlines()[0].partition("#")[0]
    shell(checkout, f"{command} --cfg-options {shlex.join(TINY)}")
    left = {path.name for path in (checkout / "work_dirs" / "quickstart").iterdir()}
    assert {"summary.json", "predictions.png", "conditioning.png", "epoch_1.pth"} <= left


def test_own_data(checkout):
    (block,) = BLOCKS["Your own data"]
    for part in ("train", "val"):
        coco_set(checkout / "data" / "my_dataset" / part, ["cat", "dog"])
    output = shell(checkout, f"{block.rstrip()} --cfg-options {shlex.join(OWN_DATA)}")
    assert "coco/segm_mAP" in output
    assert (checkout / "work_dirs" / "my_config" / "epoch_1.pth").is_file()


def test_own_backbone(tmp_path, monkeypatch):
    (block,) = BLOCKS["Your own backbone"]
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    cfg = Config.fromfile("mine.py")
    cfg.model.backbone.init_cfg = None
    model = init_detector(cfg, device="cpu")
    sites = mmspectral.sites(model)
    assert len(sites) == 12 and {site.kind for site in sites} == {"conditioned"}
    assert type(model.backbone).__module__.startswith("mmdet.")


def test_any_model(capsys):
    pytest.importorskip("timm")
    (block,) = BLOCKS["timm, transformers, your `nn.Module`"]
    names = {}
    exec(block, names)
    assert type(names["model"].blocks[0].attn.qkv).__module__.startswith("torch.")
    assert "blocks.11.attn.qkv" in capsys.readouterr().out

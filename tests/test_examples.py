"""Each example config, copied beside a data set of its user, trains for two steps and is evaluated."""

import shutil
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.runner import Runner

from mmspectral.arguments import host_package
from mmspectral.datasets.check import check_before_training
from tests.helpers import CONFIGS, class_folders, coco_set

EXAMPLES = {path.stem: path for path in sorted((CONFIGS / "examples").glob("*.py"))}
EACH = pytest.mark.parametrize("name", EXAMPLES)
# Two steps in the main process, without downloads and mixed precision.
TWO_STEPS = {
    "train_cfg.max_epochs": 1,
    "train_cfg.val_interval": 1,
    "train_dataloader.batch_size": 1,
    **{f"{part}_dataloader.num_workers": 0 for part in ("train", "val", "test")},
    **{f"{part}_dataloader.persistent_workers": False for part in ("train", "val", "test")},
    "model.backbone.init_cfg": None,
    "optim_wrapper.type": "OptimWrapper",
    "load_from": None,
    "default_hooks.checkpoint.save_optimizer": False,
    "work_dir": "out",
}
RESIZE = {"train_dataloader.dataset.pipeline.2.scale": (64, 64)}
MULTI_SCALE = {
    f"train_dataloader.dataset.pipeline.3.transforms.{step}.scales": [(64, 64)] for step in ("0.0", "1.0", "1.2")
}
SMALL_IMAGES = {
    "boxes-only_faster-rcnn": RESIZE,
    "detr_conditioned-decoder": MULTI_SCALE,
    "own-data_full-size": MULTI_SCALE,
    "one-stage_retinanet": RESIZE,
    "own-data_small": RESIZE,
}


@EACH
def test_a_copy_of_an_example_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = dict(TWO_STEPS)
    for part in ("train", "val"):
        if name in SMALL_IMAGES:
            coco_set(Path("data", "my_dataset", part), ["cat", "dog"])
        else:
            class_folders(Path("data", "my_images", part), ["cat", "dog"], images=1)
    if name in SMALL_IMAGES:
        options |= {**SMALL_IMAGES[name], "val_dataloader.dataset.pipeline.1.scale": (64, 64)}
    cfg = Config.fromfile(shutil.copy(EXAMPLES[name], "mine.py"))
    cfg.merge_from_dict(options)
    assert host_package(cfg) == cfg.default_scope
    check_before_training(cfg)
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.iter == 2
    assert runner.message_hub.get_scalar("train/loss").current() > 0
    assert Path("out", "epoch_1.pth").is_file()


@EACH
def test_an_example_fits_on_a_screen_resumes_exactly_and_brings_its_classes_everywhere(name, tmp_path):
    assert len(EXAMPLES[name].read_text().splitlines()) <= 45
    cfg = Config.fromfile(shutil.copy(EXAMPLES[name], tmp_path))
    assert cfg.default_hooks.epoch_seed.type == "mmspectral.EpochSeedHook"
    assert cfg.train_dataloader.persistent_workers is False
    assert cfg.train_dataloader.dataset.pipeline[0].type == "mmspectral.LoadImageFromFile"
    for part in ("train", "val", "test"):
        assert cfg[f"{part}_dataloader"].dataset.metainfo.classes == cfg.classes
    roi = cfg.model.get("roi_head", {})
    heads = [cfg.model.get("bbox_head"), cfg.model.get("head"), roi.get("bbox_head"), roi.get("mask_head")]
    assert {head.num_classes for head in heads if head} == {len(cfg.classes)}

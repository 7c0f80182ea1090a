"""What make_fault_tolerant changes in a config, and what it leaves alone."""

import mmcv.transforms
import mmengine.hooks
import pytest
from mmengine.config import Config

from mmspectral.engine.runner.fault_tolerance import HOOKS, IMAGE_LOADER, make_fault_tolerant
from mmspectral.errors import UsageError


def test_default_parts_and_their_switches():
    pipeline = [dict(type="LoadImageFromFile", backend_args=None), dict(type="Resize")]
    data = dict(type="RepeatDataset", dataset=dict(type="CocoDataset", pipeline=pipeline))
    settings = dict(
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=3), logger=dict(type="LoggerHook")),
        custom_hooks=[dict(type="EMAHook"), dict(type="mmspectral.EpochSeedHook")],
        train_dataloader=dict(persistent_workers=True, dataset=data),
        val_dataloader=dict(persistent_workers=True, dataset=dict(pipeline=pipeline)),
    )
    cfg = Config(settings)
    make_fault_tolerant(cfg)
    assert cfg.default_hooks.checkpoint == dict(type="mmspectral.CheckpointHook", interval=3)
    assert cfg.default_hooks.logger == dict(type="LoggerHook")
    assert [hook.type for hook in cfg.custom_hooks] == ["EMAHook", "mmspectral.EpochSeedHook", HOOKS[0], HOOKS[2]]
    assert cfg.train_dataloader.persistent_workers is False and cfg.val_dataloader.persistent_workers is True
    assert cfg.train_dataloader.dataset.dataset.pipeline[0] == dict(type=IMAGE_LOADER, backend_args=None)
    assert cfg.val_dataloader == settings["val_dataloader"]
    once = cfg.to_dict()
    make_fault_tolerant(cfg)
    assert cfg.to_dict() == once == Config.fromstring(cfg.pretty_text, ".py").to_dict()

    off = Config(dict(settings, fault_tolerance=False))
    make_fault_tolerant(off)
    assert off.to_dict() == dict(settings, fault_tolerance=False)

    tuned = Config(dict(settings, fault_tolerance=dict(tolerated_failures=2, skip_unreadable=True)))
    make_fault_tolerant(tuned)
    assert tuned.default_hooks.checkpoint.tolerated_failures == 2
    assert tuned.train_dataloader.dataset.dataset.pipeline[0].skip_unreadable is True

    own = dict(default_hooks=dict(checkpoint=dict(type="mmengine.CheckpointHook")))
    kept = Config(own)
    make_fault_tolerant(kept)
    assert kept.default_hooks == own["default_hooks"]
    bare = Config(dict())
    make_fault_tolerant(bare)
    assert bare.default_hooks.checkpoint == dict(type="mmspectral.CheckpointHook")
    for wrong in (dict(tolerated=1), "yes"):
        with pytest.raises(UsageError, match="fault_tolerance"):
            make_fault_tolerant(Config(dict(fault_tolerance=wrong)))


def test_parts_that_a_config_names_by_python_imports():
    """mmdet's new style; and early stopping, by name and by class."""
    stopping = [dict(type=kind, monitor="acc") for kind in ("EarlyStoppingHook", mmengine.hooks.EarlyStoppingHook)]
    cfg = Config(
        dict(
            default_hooks=dict(checkpoint=dict(type=mmengine.hooks.CheckpointHook, interval=3)),
            custom_hooks=[*stopping, dict(type="mmengine.EarlyStoppingHook", monitor="acc")],
            train_dataloader=dict(dataset=dict(pipeline=[dict(type=mmcv.transforms.LoadImageFromFile)])),
        )
    )
    make_fault_tolerant(cfg)
    assert cfg.default_hooks.checkpoint == dict(type="mmspectral.CheckpointHook", interval=3)
    assert [hook.type for hook in cfg.custom_hooks[:3]] == ["mmspectral.EarlyStoppingHook"] * 2 + [
        "mmengine.EarlyStoppingHook"
    ]
    assert cfg.train_dataloader.dataset.pipeline == [dict(type=IMAGE_LOADER)]


def test_another_runner_goes_without():
    settings = dict(runner_type="FlexibleRunner", default_hooks=dict(checkpoint=dict(type="CheckpointHook")))
    cfg = Config(settings)
    make_fault_tolerant(cfg)
    assert cfg.to_dict() == settings
    with pytest.raises(UsageError, match="runner_type='FlexibleRunner' goes without"):
        make_fault_tolerant(Config(dict(settings, fault_tolerance=dict())))

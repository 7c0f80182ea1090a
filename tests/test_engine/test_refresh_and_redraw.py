"""CorrectionRefreshHook and FeatureRedrawHook in real runs: when C and w change, resuming, averaged models."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock

import mmpretrain.engine.hooks
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import nn

from mmspectral.engine.hooks import FeatureRedrawHook
from mmspectral.layers import feature_kernels
from mmspectral.models import DarkViT
from mmspectral.ops.random_features import draw_projection

BACKBONE = dict(arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32), img_size=16, patch_size=8)
DARK = dict(type="dark", num_features=12, proposal="sharp", shift="fixed", seed=7)
EMA = [dict(type="EMAHook", momentum=0.3, update_buffers=buffers) for buffers in (False, True)]
MMPRETRAIN_EMA = dict(type=mmpretrain.engine.hooks.EMAHook, momentum=0.3, update_buffers=True, evaluate_on_origin=True)
QKV, KERNEL = "backbone.layers.1.attn.qkv", "backbone.layers.1.attn.kernel"


class Model(BaseModel):
    def __init__(self, kernel=DARK):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = DarkViT(**BACKBONE, kernel=kernel, conditioning=dict(type="SVDCorrection", interval=3))
        self.head = nn.Linear(16, 2)

    def init_weights(self):
        """Keep torch's draw."""

    def forward(self, inputs, mode="tensor"):
        y = self.head(self.backbone(inputs)[-1])
        return dict(loss=y.sin().square().sum()) if mode == "loss" else y


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return dict(inputs=torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)))


def fresh(W):
    """C of the weight of the last layer."""
    qkv = Model().get_submodule(QKV)
    return qkv.conditioning.matrix(W, qkv.layout)


def seen(model):
    """Weight and correction of the last layer, and counter and draw of its features."""
    qkv, kernel = model.get_submodule(QKV), model.get_submodule(KERNEL)
    return SimpleNamespace(
        W=qkv.weight.detach().clone(),
        C=qkv.correction.clone(),
        redraws=int(kernel.redraws) if kernel.draws else None,
        w=kernel.w.detach().clone(),
        storage=(qkv.correction.data_ptr(), kernel.w.data_ptr()),
    )


class Watch(Hook):
    """Write down what each training iteration and each validated batch sees."""

    priority = "LOWEST"

    def __init__(self):
        self.trained, self.losses, self.validated = [], [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.trained.append(seen(runner.model))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(outputs["loss"].item())

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.validated.append(seen(runner.model))


def run(work_dir, updates, ema=None, accumulated=1, by_epoch=False, interval=3, load_from=None, resume=False, **kwargs):
    """Train by iterations, or by epochs of two; validate every second one, of two batches."""
    watch = Watch()
    loader = dict(batch_size=2, num_workers=0, dataset=Data(), collate_fn=dict(type="default_collate"))
    by_iteration = dict(type="IterBasedTrainLoop", max_iters=updates * accumulated, val_interval=2)
    runner = Runner(
        Model(**kwargs),
        str(work_dir),
        train_dataloader=dict(
            loader, sampler=dict(type="DefaultSampler" if by_epoch else "InfiniteSampler", shuffle=False)
        ),
        val_dataloader=dict(loader, sampler=dict(type="DefaultSampler", shuffle=False)),
        train_cfg=dict(by_epoch=True, max_epochs=updates // 2) if by_epoch else by_iteration,
        val_cfg=dict(),
        val_evaluator=Evaluator([]),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9), accumulative_counts=accumulated),
        default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
        custom_hooks=[
            dict(type="mmspectral.CorrectionRefreshHook"),
            dict(type="mmspectral.FeatureRedrawHook", interval=interval, by_epoch=by_epoch),
            watch,
            *([copy.deepcopy(ema)] if ema else []),
        ],
        load_from=load_from,
        resume=resume,
        experiment_name=f"{work_dir}-{updates}-{resume}".replace("/", "-"),
        log_level="ERROR",
    )
    runner.train()
    return runner, watch


def state(work_dir, iteration):
    return torch.load(work_dir / f"iter_{iteration}.pth", weights_only=False)


def drawn(counter):
    return draw_projection(12, 8, 7, 1, counter)


def assert_equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_in_place_every_so_many_updates(tmp_path, accumulated):
    """C is that of the weights at the last multiple of 3; validation in between uses C and w as they are."""
    _, watch = run(tmp_path, 8, accumulated=accumulated)
    for iteration, now in enumerate(watch.trained):
        update = iteration // accumulated
        assert torch.equal(now.C, fresh(watch.trained[update // 3 * 3 * accumulated].W)), iteration
        assert now.redraws == update // 3 and torch.equal(now.w, drawn(now.redraws))
        assert now.storage == watch.trained[0].storage
    for validated, trained in zip(watch.validated[::2], watch.trained[1::2], strict=True):
        assert torch.equal(validated.C, trained.C) and torch.equal(validated.w, trained.w)
    assert any(not torch.allclose(validated.C, fresh(validated.W)) for validated in watch.validated)


def test_redrawn_every_so_many_epochs(tmp_path):
    _, watch = run(tmp_path, 8, interval=2, by_epoch=True)
    assert [now.redraws for now in watch.trained] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="by_epoch=True needs an epoch-based loop"):
        FeatureRedrawHook(2, by_epoch=True).before_train(SimpleNamespace(train_loop=Mock(spec=IterBasedTrainLoop)))


@pytest.mark.parametrize("ema", [None, *EMA, MMPRETRAIN_EMA], ids=["none", "ema", "ema-buffers", "mmpretrain"])
def test_a_resumed_run_continues_identically(tmp_path, ema):
    straight, watch = run(tmp_path / "straight", 8, ema=ema)
    _, rest = run(tmp_path / "resumed", 8, ema=ema, resume=True, load_from=f"{straight.work_dir}/iter_4.pth")
    assert rest.losses == watch.losses[4:]
    for a, b in zip(watch.trained[4:], rest.trained, strict=True):
        assert torch.equal(a.C, b.C) and torch.equal(a.w, b.w)
    for key in ("state_dict", "ema_state_dict") if ema else ("state_dict",):
        assert_equal(*(state(tmp_path / name, 8)[key] for name in ("straight", "resumed")))


@pytest.mark.parametrize("ema", [*EMA, MMPRETRAIN_EMA], ids=["ema", "ema-buffers", "mmpretrain"])
def test_averaged_model_has_the_correction_of_its_weights_and_the_newest_draws(tmp_path, ema):
    """mmpretrain's hook also evaluates the trained weights, inside after_val_epoch."""
    runner, watch = run(tmp_path, 8, ema=ema)
    _, plain = run(tmp_path / "plain", 8)
    assert watch.losses == plain.losses, "averaging and validating the average leave training as it is"
    step = 4 if ema is MMPRETRAIN_EMA else 2
    for number, validated in enumerate(watch.validated):
        assert validated.redraws == (2 * (number // step) + 1) // 3 and torch.equal(
            validated.w, drawn(validated.redraws)
        )
        if number % step < 2:
            assert torch.equal(validated.C, fresh(validated.W))
            assert not any(torch.equal(validated.W, trained.W) for trained in watch.trained[1:])
        else:
            assert any(torch.equal(validated.C, trained.C) for trained in watch.trained)
    saved = state(tmp_path, 8)
    average, trained = saved["state_dict"], {name[7:]: value for name, value in saved["ema_state_dict"].items()}
    assert torch.equal(average[f"{QKV}.correction"], fresh(average[f"{QKV}.weight"]))
    assert torch.equal(trained[f"{QKV}.weight"], runner.model.get_parameter(f"{QKV}.weight"))
    assert torch.equal(trained[f"{QKV}.correction"], runner.model.get_buffer(f"{QKV}.correction"))
    for weights in (average, trained):
        assert weights[f"{KERNEL}.redraws"] == 2 and torch.equal(weights[f"{KERNEL}.w"], drawn(2))


def test_without_evaluating_on_the_average_nothing_is_exchanged(tmp_path):
    _, watch = run(tmp_path, 4, ema=dict(MMPRETRAIN_EMA, evaluate_on_ema=False))
    assert all(any(torch.equal(now.C, trained.C) for trained in watch.trained) for now in watch.validated)


def test_fine_tuning_begins_with_the_correction_of_the_loaded_weights(tmp_path):
    run(tmp_path / "first", 2)
    _, watch = run(tmp_path / "second", 1, load_from=str(tmp_path / "first" / "iter_2.pth"))
    assert torch.equal(watch.trained[0].W, state(tmp_path / "first", 2)["state_dict"][f"{QKV}.weight"])
    assert torch.equal(watch.trained[0].C, fresh(watch.trained[0].W))


def test_trained_features_are_averaged_as_any_weight(tmp_path):
    learned = dict(type="learned", num_features=12)
    runner, _ = run(tmp_path, 4, interval=1, ema=EMA[1], kernel=learned)
    average = next(hook.ema_model for hook in runner.hooks if hasattr(hook, "ema_model"))
    for own, averaged in zip(feature_kernels(runner.model).values(), feature_kernels(average).values(), strict=True):
        assert not torch.equal(own.w, averaged.w)


def test_a_twin_without_features_is_told():
    logger = Mock()
    FeatureRedrawHook(1).before_train(SimpleNamespace(model=Model(kernel=None), logger=logger))
    assert "nothing is redrawn" in logger.warning.call_args.args[0]


@pytest.mark.parametrize("interval", [0, -1, None, 2.5])
def test_an_interval_that_counts_nothing_is_refused(interval):
    with pytest.raises(ValueError, match="interval must be a positive integer"):
        FeatureRedrawHook(interval)

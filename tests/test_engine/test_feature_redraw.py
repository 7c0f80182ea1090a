"""FeatureRedrawHook in real runs of mmengine: when draws change, resuming, accumulated gradients, averaged models."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mmpretrain.engine.hooks
import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS as HOST_HOOKS
from mmengine.registry import DefaultScope
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import nn

from mmspectral.engine.hooks.feature_redraw_hook import FeatureRedrawHook
from mmspectral.engine.runner.launch import launch_run, set_resume
from mmspectral.layers import feature_kernels
from mmspectral.models import DarkViT
from mmspectral.ops.random_features import draw_projection

TOY = Path(__file__).resolve().parents[1] / "data" / "toy_classification" / "config.py"
BACKBONE = dict(arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32), img_size=16, patch_size=8)
DARK = dict(type="dark", num_features=12, proposal="sharp", shift="fixed", seed=7)
EMA = [dict(type="EMAHook", momentum=0.3, update_buffers=buffers) for buffers in (False, True)]
MMPRETRAIN_EMA = dict(type=mmpretrain.engine.hooks.EMAHook, momentum=0.3, update_buffers=True, evaluate_on_origin=True)


class Model(BaseModel):
    def __init__(self, kernel=DARK, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = DarkViT(**BACKBONE, kernel=kernel, **kwargs)
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


def draws(model):
    """Return the counter (False if w is trained) and w of the last layer."""
    kernel = list(feature_kernels(model).values())[-1]
    return kernel.draws and int(kernel.redraws), kernel.w.detach().clone()


class Watch(Hook):
    """Write down the draws and loss of each iteration, and draws and weights of each validated batch."""

    priority = "LOWEST"

    def __init__(self):
        self.trained, self.losses, self.validated, self.pointers = [], [], [], set()

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.trained.append(draws(runner.model))
        self.pointers.update(kernel.w.data_ptr() for kernel in feature_kernels(runner.model).values())

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(outputs["loss"].item())

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.validated.append((*draws(runner.model), runner.model.head.weight.detach().clone()))


def run(work_dir, updates, interval=3, ema=None, accumulated=1, resume=False, by_epoch=None, **kwargs):
    """Train; with ``by_epoch`` not None in epochs of two iterations, otherwise by iterations."""
    watch = Watch()
    model = Model(**kwargs)
    loader = dict(batch_size=2, num_workers=0, dataset=Data(), collate_fn=dict(type="default_collate"))
    by_iteration = dict(type="IterBasedTrainLoop", max_iters=updates * accumulated, val_interval=2)
    sampler = dict(type="InfiniteSampler" if by_epoch is None else "DefaultSampler", shuffle=False)
    runner = Runner(
        model,
        str(work_dir),
        train_dataloader=dict(loader, sampler=sampler),
        val_dataloader=dict(loader, sampler=dict(type="DefaultSampler", shuffle=False)),
        train_cfg=by_iteration if by_epoch is None else dict(by_epoch=True, max_epochs=updates // 2),
        val_cfg=dict(),
        val_evaluator=Evaluator([]),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9), accumulative_counts=accumulated),
        default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
        custom_hooks=[FeatureRedrawHook(interval, bool(by_epoch)), watch] + ([copy.deepcopy(ema)] if ema else []),
        resume=resume,
        experiment_name=f"{work_dir}-{updates}-{resume}".replace("/", "-"),
        log_level="ERROR",
    )
    runner.train()
    return runner, watch


def expected(counter, layer=1):
    return draw_projection(12, 8, 7, layer, counter)


def state(work_dir, iteration):
    return torch.load(work_dir / f"iter_{iteration}.pth", weights_only=False)


@pytest.mark.parametrize("scope", ["mmdet", "mmpretrain"])
def test_is_found_under_the_scope_of_each_host(scope):
    with DefaultScope.overwrite_default_scope(scope):
        hook = HOST_HOOKS.build(dict(type="mmspectral.FeatureRedrawHook", interval=5))
    assert type(hook) is FeatureRedrawHook and hook.interval == 5


@pytest.mark.parametrize("interval", [0, -1, None, 2.5])
def test_an_interval_that_counts_nothing_is_refused(interval):
    with pytest.raises(ValueError, match="interval must be a positive integer"):
        FeatureRedrawHook(interval)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_redrawn_in_place_every_so_many_updates(tmp_path, accumulated):
    """Also with validation in between, which changes nothing."""
    runner, watch = run(tmp_path, 8, accumulated=accumulated)
    assert [counter for counter, _ in watch.trained] == [i // accumulated // 3 for i in range(8 * accumulated)]
    for counter, w in watch.trained:
        assert torch.equal(w, expected(counter))
    assert watch.pointers == {kernel.w.data_ptr() for kernel in feature_kernels(runner.model).values()}
    for (counter, w, _), (trained, _) in zip(watch.validated[::2], watch.trained[1::2], strict=True):
        assert counter == trained and torch.equal(w, expected(counter))


def test_redrawn_every_so_many_epochs(tmp_path):
    _, watch = run(tmp_path, 8, interval=2, by_epoch=True)
    assert [counter for counter, _ in watch.trained] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="by_epoch=True needs an epoch-based loop"):
        FeatureRedrawHook(2, by_epoch=True).before_train(SimpleNamespace(train_loop=Mock(spec=IterBasedTrainLoop)))


@pytest.mark.parametrize("ema", [None, *EMA, MMPRETRAIN_EMA], ids=["none", "ema", "ema-buffers", "mmpretrain"])
def test_a_resumed_run_continues_identically(tmp_path, ema):
    straight, watch = run(tmp_path / "straight", 8, ema=ema)
    (tmp_path / "resumed").mkdir()
    for name in ("iter_4.pth", "last_checkpoint"):
        shutil.copy(tmp_path / "straight" / name, tmp_path / "resumed")
    (tmp_path / "resumed" / "last_checkpoint").write_text(str(tmp_path / "resumed" / "iter_4.pth"))
    resumed, rest = run(tmp_path / "resumed", 8, ema=ema, resume=True)
    assert [counter for counter, _ in rest.trained] == [1, 1, 2, 2]
    assert rest.losses == watch.losses[4:]
    for (_, a), (_, b) in zip(watch.trained[4:], rest.trained, strict=True):
        assert torch.equal(a, b)
    for key in ("state_dict", "ema_state_dict") if ema else ("state_dict",):
        a, b = (state(tmp_path / name, 8)[key] for name in ("straight", "resumed"))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("ema", [*EMA, MMPRETRAIN_EMA], ids=["ema", "ema-buffers", "mmpretrain"])
def test_averaged_model_has_the_newest_draws(tmp_path, ema):
    runner, watch = run(tmp_path, 8, ema=ema)
    _, plain = run(tmp_path / "plain", 8)
    assert watch.losses == plain.losses, "averaging leaves training as it is"
    step = 4 if ema is MMPRETRAIN_EMA else 2  # batches of each validation: mmpretrain's also validates the original
    assert [counter for counter, _, _ in watch.validated] == [i // 3 for i in (1, 3, 5, 7) for _ in range(step)]
    for counter, w, _ in watch.validated:
        assert torch.equal(w, expected(counter))
    averaged = [head for _, _, head in watch.validated[::step]]
    plainly = [head for _, _, head in plain.validated[::2]]
    assert not any(torch.equal(a, b) for a, b in zip(averaged, plainly, strict=True))
    saved = state(tmp_path, 8)
    for weights in (saved["state_dict"], {n[7:]: t for n, t in saved["ema_state_dict"].items()}):
        assert torch.equal(weights["backbone.layers.1.attn.kernel.w"], expected(2))
        assert weights["backbone.layers.1.attn.kernel.redraws"] == 2


def test_trained_features_are_averaged_as_any_weight(tmp_path):
    learned = dict(type="learned", num_features=12)
    runner, _ = run(tmp_path, 4, interval=1, ema=EMA[1], kernel=learned)
    average = next(hook.ema_model for hook in runner.hooks if hasattr(hook, "ema_model"))
    for own, averaged in zip(feature_kernels(runner.model).values(), feature_kernels(average).values(), strict=True):
        assert not torch.equal(own.w, averaged.w)


def test_recomputed_blocks_see_the_same_draws(tmp_path):
    stored, watch = run(tmp_path / "stored", 5, interval=1)
    recomputed, other = run(tmp_path / "recomputed", 5, interval=1, with_cp=True)
    assert watch.losses == other.losses
    for a, b in zip(stored.model.parameters(), recomputed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_twin_without_features_is_told():
    logger = Mock()
    FeatureRedrawHook(1).before_train(SimpleNamespace(model=Model(kernel=None), logger=logger))
    assert "nothing is redrawn" in logger.warning.call_args.args[0]


@pytest.mark.parametrize("by_epoch", [False, True])
def test_exactly_resumed(tmp_path, monkeypatch, by_epoch):
    """A run with dropout and shuffled data goes on as if nothing had happened."""
    monkeypatch.syspath_prepend(TOY.parent)
    for name in ("straight", "resumed"):
        cfg = Config.fromfile(TOY)
        kernel = dict(type="dark", num_features=12)
        cfg.model.backbone.update(type="mmspectral.DarkViT", kernel=kernel, drop_rate=0.1)
        cfg.train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=4)
        cfg.default_hooks.checkpoint = dict(type="mmspectral.CheckpointHook", interval=1)
        hook = dict(type="mmspectral.FeatureRedrawHook", interval=1 if by_epoch else 3, by_epoch=by_epoch)
        cfg.update(work_dir=str(tmp_path / name), launcher="none", custom_hooks=[hook, EMA[1]])
        if name == "resumed":
            set_resume(cfg, str(tmp_path / "straight" / "epoch_2.pth"))
        launch_run(cfg, Runner.train)
    a, b = (torch.load(tmp_path / name / "epoch_4.pth", weights_only=False) for name in ("straight", "resumed"))
    assert a["state_dict"]["backbone.layers.0.attn.kernel.redraws"] == (3 if by_epoch else 5)
    for key in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(tensor, b[key][name]) for name, tensor in a[key].items())

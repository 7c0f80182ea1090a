"""CorrectionRefreshHook in real runs of mmengine: when C changes, resuming, accumulated gradients, averaged models."""

import copy

import mmpretrain.engine.hooks
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel, ExponentialMovingAverage
from mmengine.runner import Runner
from torch import nn

from mmspectral.layers import SVDCorrection, condition_linear, refresh_corrections

EMA = [dict(type="EMAHook", momentum=0.3, update_buffers=buffers) for buffers in (False, True)]
MMPRETRAIN_EMA = dict(type=mmpretrain.engine.hooks.EMAHook, momentum=0.3, evaluate_on_origin=True)


class Model(BaseModel):
    def __init__(self, interval):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        condition_linear(self, "qkv", SVDCorrection(interval=interval), ("q", "k", "v"), 2, "[3][heads][d]")

    def forward(self, inputs, mode="tensor"):
        y = self.qkv(inputs)
        return dict(loss=y.sin().square().sum()) if mode == "loss" else y


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return dict(inputs=torch.randn(8, generator=torch.Generator().manual_seed(index)))


def fresh(module):
    return module.conditioning.matrix(module.weight, module.layout)


class Watch(Hook):
    """Write down C and W at the start of each iteration and, for each validated batch, whether C was that of W."""

    priority = "LOWEST"

    def __init__(self):
        self.C, self.W, self.validated = [], [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.C.append(runner.model.qkv.correction.clone())
        self.W.append(runner.model.qkv.weight.detach().clone())

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        qkv = runner.model.qkv
        self.validated.append((qkv.weight.detach().clone(), qkv.correction.clone(), fresh(qkv)))


def run(work_dir, max_iters, interval=3, ema=None, accumulative_counts=1, resume=False, load_from=None):
    watch = Watch()
    loader = dict(batch_size=2, num_workers=0, dataset=Data(), collate_fn=dict(type="default_collate"))
    hooks = [dict(type="mmspectral.CorrectionRefreshHook"), watch] + ([copy.deepcopy(ema)] if ema else [])
    runner = Runner(
        Model(interval),
        str(work_dir),
        train_dataloader=dict(loader, sampler=dict(type="InfiniteSampler", shuffle=False)),
        val_dataloader=dict(loader, sampler=dict(type="DefaultSampler", shuffle=False)),
        train_cfg=dict(type="IterBasedTrainLoop", max_iters=max_iters, val_interval=2),
        val_cfg=dict(),
        val_evaluator=Evaluator([]),
        optim_wrapper=dict(
            type="OptimWrapper",
            optimizer=dict(type="SGD", lr=0.05, momentum=0.9),
            accumulative_counts=accumulative_counts,
        ),
        default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False)),
        custom_hooks=hooks,
        resume=resume,
        load_from=load_from,
        experiment_name=f"{work_dir}-{max_iters}-{resume}".replace("/", "-"),
        log_level="ERROR",
    )
    runner.train()
    return runner, watch


def state(work_dir, iteration):
    return torch.load(work_dir / f"iter_{iteration}.pth", weights_only=False)


@pytest.mark.parametrize("accumulative_counts", [1, 2])
def test_refreshed_every_so_many_updates(tmp_path, accumulative_counts):
    """The correction at update n is that of the weights at the last multiple of 3, also with validation in between."""
    runner, watch = run(tmp_path, 8 * accumulative_counts, accumulative_counts=accumulative_counts)
    qkv = runner.model.qkv
    for iteration, C in enumerate(watch.C):
        last = iteration // accumulative_counts // 3 * 3 * accumulative_counts
        assert torch.equal(C, qkv.conditioning.matrix(watch.W[last], qkv.layout)), iteration
    assert not torch.allclose(watch.C[0], watch.C[-1])
    assert any(not torch.allclose(C, own) for _, C, own in watch.validated), "evaluation uses C as it is"


@pytest.mark.parametrize("ema", [None, *EMA, MMPRETRAIN_EMA], ids=["none", "ema", "ema-buffers", "mmpretrain"])
def test_a_resumed_run_continues_identically(tmp_path, ema):
    straight, watch = run(tmp_path / "straight", 8, ema=ema)
    resumed, rest = run(tmp_path / "resumed", 8, ema=ema, resume=True, load_from=f"{straight.work_dir}/iter_4.pth")
    assert len(rest.C) == 4
    for a, b in zip(watch.C[4:] + watch.W[4:], rest.C + rest.W, strict=True):
        assert torch.equal(a, b)
    for key in ("state_dict", "ema_state_dict") if ema else ("state_dict",):
        a, b = (state(tmp_path / name, 8)[key] for name in ("straight", "resumed"))
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("ema", EMA, ids=["ema", "ema-buffers"])
def test_averaged_model_has_the_correction_of_its_weights(tmp_path, ema):
    runner, watch = run(tmp_path, 8, ema=ema)
    plain, plain_watch = run(tmp_path / "plain", 8)
    for a, b in zip(watch.C + watch.W, plain_watch.C + plain_watch.W, strict=True):
        assert torch.equal(a, b), "averaging and validating the average leave training as it is"
    assert len(watch.validated) == 4
    for W, C, own in watch.validated:
        assert not any(torch.equal(W, trained) for trained in watch.W[1:])
        assert torch.equal(C, own)
    saved = state(tmp_path, 8)
    again = Model(3)
    again.load_state_dict(saved["state_dict"], strict=True)
    assert torch.equal(again.qkv.correction, fresh(again.qkv))
    assert torch.equal(saved["ema_state_dict"]["module.qkv.weight"], runner.model.qkv.weight)
    assert torch.equal(saved["ema_state_dict"]["module.qkv.correction"], runner.model.qkv.correction)
    assert not torch.allclose(runner.model.qkv.correction, fresh(runner.model.qkv)), "of update 6 of 8"


def test_mmpretrains_second_evaluation_sees_the_trained_model(tmp_path):
    """With evaluate_on_origin its EMA hook evaluates the trained weights inside after_val_epoch."""
    _, watch = run(tmp_path, 8, ema=MMPRETRAIN_EMA)
    assert len(watch.validated) == 8
    for (W, C, own), (origin_W, origin_C, _) in zip(watch.validated[::2], watch.validated[1::2], strict=True):
        assert torch.equal(C, own) and not torch.equal(W, origin_W)
        assert any(torch.equal(origin_C, trained) for trained in watch.C)


def test_without_evaluating_on_the_average_nothing_is_exchanged(tmp_path):
    _, watch = run(tmp_path, 4, ema=dict(MMPRETRAIN_EMA, evaluate_on_ema=False))
    assert all(any(torch.equal(C, trained) for trained in watch.C) for _, C, _ in watch.validated)


def test_fine_tuning_begins_with_the_correction_of_the_loaded_weights(tmp_path):
    run(tmp_path / "first", 2)
    runner, watch = run(tmp_path / "second", 1, load_from=str(tmp_path / "first" / "iter_2.pth"))
    qkv = runner.model.qkv
    assert torch.equal(watch.W[0], state(tmp_path / "first", 2)["state_dict"]["qkv.weight"])
    assert torch.equal(watch.C[0], qkv.conditioning.matrix(watch.W[0], qkv.layout))


@pytest.mark.parametrize("update_buffers", [False, True])
def test_an_average_without_the_hook_is_refreshed_by_hand(update_buffers):
    model, x = Model(3), torch.randn(4, 8)
    average = ExponentialMovingAverage(model, momentum=0.3, update_buffers=update_buffers)
    for update in range(3):
        refresh_corrections(model, updates=update)
        with torch.no_grad():
            model.qkv.weight += torch.randn(24, 8)
        average.update_parameters(model)
    qkv = average.module.qkv
    assert not torch.allclose(qkv.correction, fresh(qkv))
    assert refresh_corrections(average) == 1
    assert torch.equal(qkv.correction, fresh(qkv))
    exact = nn.functional.linear(x, qkv.weight + fresh(qkv), qkv.bias)
    torch.testing.assert_close(average.eval()(x), exact)

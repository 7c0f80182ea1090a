"""Averages of models (EMA, SWA) have the sigma, the C and the features that follow from what was averaged."""

import copy

import pytest
import torch
from mmengine.model import ExponentialMovingAverage, StochasticWeightAverage
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mmspectral.layers import build_conditioning, build_kernel, condition_linear, refresh_corrections
from mmspectral.layers.alternatives import SpectralNormLinear
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.random_features import draw_projection

AVERAGES = {
    "ema": lambda model: ExponentialMovingAverage(model, momentum=0.2),
    "ema, buffers": lambda model: ExponentialMovingAverage(model, momentum=0.2, update_buffers=True),
    "swa, buffers": lambda model: StochasticWeightAverage(model, update_buffers=True),
    "torch swa": AveragedModel,
    "torch ema, buffers": lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True),
}
STATES = ("SpectralNorm", "SigmaReparam", "SVDCorrection", "PolarCorrection", "dark", "performer")


class Attention(nn.Module):
    """One head-wise attention with state in the projection or in the kernel."""

    def __init__(self, state):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.kernel = build_kernel(dict(type=state, num_features=12) if state.islower() else None, 2, 8)
        if not state.islower():
            cfg = dict(type=state, interval=3) if state.endswith("Correction") else dict(type=state)
            condition_linear(self, "qkv", build_conditioning(cfg), ("q", "k", "v"), 2, "[3][heads][d]")

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.kernel(q, k, v)


def tokens():
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))


def train(model, optimizer, step):
    refresh_corrections(model, updates=step)
    if getattr(model.kernel, "draws", False) and step % 2:
        model.kernel.redraw(step)
    model(tokens()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def expected(state, model):
    """A model with the parameters of ``model``, and state made from them."""
    fresh = Attention(state)
    with torch.no_grad():
        for own, other in zip(fresh.parameters(), model.parameters(), strict=True):
            own.copy_(other)
    if hasattr(fresh.qkv, "refresh"):
        fresh.qkv.refresh()
    if hasattr(fresh.kernel, "redraw"):
        fresh.kernel.redraw(int(model.kernel.redraws))
    return fresh


@pytest.mark.parametrize("how", ["used", "saved", "used in training mode"])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("state", STATES)
def test_state_follows_from_what_was_averaged(state, average, how):
    torch.manual_seed(0)
    model = Attention(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    averaged = AVERAGES[average](model)
    averaged.eval()
    for step in range(6):
        train(model, optimizer, step)
        averaged.update_parameters(model)
        with torch.no_grad():
            averaged(tokens())  # also between updates
    module = averaged.module
    exact = expected(state, module).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        if how == "saved":
            loaded = Attention(state).eval()
            loaded.load_state_dict(module.state_dict(), strict=True)
            module = loaded
        elif how == "used in training mode":  # as torch.optim.swa_utils.update_bn does
            module.train()
        torch.testing.assert_close(module(tokens()), exact(tokens()), rtol=1e-3, atol=1e-5)
    if state.islower():
        assert torch.equal(module.kernel.w, draw_projection(12, 8, 0, 0, int(module.kernel.redraws)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("state", STATES)
def test_evaluation_recomputes_once_and_leaves_training_alone(state, monkeypatch):
    torch.manual_seed(0)
    models = [Attention(state), Attention(state)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    computed = []

    def counted(function):
        return lambda: computed.append(1) or function()

    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, step)
        average = copy.deepcopy(models[0]).eval()
        for module in (average.qkv, average.kernel):
            for name in ("_found", "refresh"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, counted(getattr(module, name)))
        with torch.no_grad():
            average.qkv.weight.data.mul_(1.1)
            for _ in range(3):
                average(tokens())
                models[0].eval()(tokens())
        models[0].train()
        assert len(computed) <= 2, "one change of the weight"
        computed.clear()
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name


@pytest.mark.parametrize("state", ["SVDCorrection", "SpectralNorm"])
def test_a_copy_computes_what_its_original_does(state):
    """A stored C is that of an earlier weight, and stays so in copies and files until their weight changes."""
    torch.manual_seed(0)
    model = Attention(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        train(model, optimizer, step)
    loaded = Attention(state)
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), loaded, copy.deepcopy(model).double().float()):
        assert torch.equal(other.eval()(tokens()), model.eval()(tokens()))


@pytest.mark.parametrize("state", ["SVDCorrection", "SpectralNorm", "SigmaReparam"])
def test_weights_from_another_rank_before_the_first_step(state):
    """DistributedDataParallel without broadcast_buffers sends parameters alone, through ``.data`` or in place."""
    torch.manual_seed(0)
    first, second = Attention(state), Attention(state)
    for own, other in zip(second.parameters(), first.parameters(), strict=True):
        own.data.copy_(other.data)
    for model in (first, second):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_features_of_another_seed_stay_as_loaded():
    kernel, other = (build_kernel(dict(type="dark", num_features=12, seed=seed), 2, 8) for seed in (0, 1))
    kernel.load_state_dict(other.state_dict())
    kernel.eval().features()
    assert torch.equal(kernel.w, other.w)


@pytest.mark.parametrize("width", [8, 64, 384, 1024])
@pytest.mark.parametrize("shape", ["normal", "trunc", "decaying"])
def test_the_first_evaluation_has_sigma_within_one_percent(width, shape):
    torch.manual_seed(0)
    linear = nn.Linear(width, width, bias=False)
    nn.init.trunc_normal_(linear.weight, std=0.02) if shape == "trunc" else nn.init.normal_(linear.weight, std=0.02)
    if shape == "decaying":
        linear.weight.data *= torch.arange(1, width + 1).rsqrt()
    exact = torch.linalg.matrix_norm(linear.weight.detach().double(), 2)
    module = SpectralNormLinear(linear, build_conditioning(dict(type="SpectralNorm")), ProjectionLayout(("q",), 4))
    for mode in (True, False):
        assert abs(module.train(mode).sigma().item() / exact - 1) < 0.01

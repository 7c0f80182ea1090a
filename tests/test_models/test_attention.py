"""The attention classes: drop-in for mmpretrain's, and the functions that their docstrings state, in float64."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.models.backbones.davit import ChannelAttention, DaViTWindowMSA
from mmpretrain.models.backbones.xcit import XCA
from mmpretrain.models.utils import MultiheadAttention, ShiftWindowMSA, WindowMSA
from mmpretrain.models.utils.attention import scaled_dot_product_attention_pyimpl
from torch import nn

from mmspectral.layers import build_conditioning, conditioned_projections, probe_tokens, saturation
from mmspectral.models import SpectralChannelAttention, SpectralMultiheadAttention, SpectralWindowMSA, SpectralXCA
from mmspectral.models.attention.adopt import adopt, condition_qkv
from mmspectral.models.attention.window import AnySizeShiftWindowMSA, SpectralDaViTWindowMSA
from mmspectral.registry import MODELS

CONDITIONING = dict(type="IdentityCorrection", scale=3.0)
WINDOW, D, HEADS = (2, 3), 24, 3


@dataclass(frozen=True)
class Case:
    """One attention class.

    Args:
        ours: The class.
        stock: mmpretrain's.
        arguments: Of both.
        explicit: From (layer, q, k, v, mask), each [B, h, N, d], to logits and to outputs [B, h, N, d].
        masked: Whether the forward takes a mask.
        variants: Further keyword arguments under which the two agree.
    """

    ours: type
    stock: type
    arguments: tuple
    explicit: Callable
    masked: bool = False
    variants: tuple[dict, ...] = field(default=({},))

    def __str__(self) -> str:
        return self.ours.__name__

    def build(self, conditioning: dict | None = None, **kwargs) -> nn.Module:
        layer = adopt(self.ours, self.stock(*self.arguments, **kwargs))
        condition_qkv(layer, build_conditioning(conditioning))
        return randomize(layer)

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        x = torch.randn(4, 6, D, dtype=dtype)
        return (x, torch.zeros(2, 6, 6, dtype=dtype).masked_fill(torch.rand(2, 6, 6) < 0.3, -100.0))[: 1 + self.masked]


def dot_product(layer, q, k, v, mask):
    logits = layer.scale * q @ k.mT
    return logits, logits.softmax(-1) @ v


def windows(layer, q, k, v, mask):
    logits = layer.scale * q @ k.mT + (0 if mask is None else mask.repeat(2, 1, 1)[:, None])
    if hasattr(layer, "relative_position_bias_table"):
        table = layer.relative_position_bias_table.double().view(3, 5, HEADS)  # [2 Wh - 1, 2 Ww - 1, h]
        for a in range(6):
            for b in range(6):
                logits[:, :, a, b] += table[a // 3 - b // 3 + 1, a % 3 - b % 3 + 2]
    return logits, logits.softmax(-1) @ v


def channels(layer, q, k, v, mask):
    logits = layer.scale * k.mT @ v
    return logits, (logits.softmax(-1) @ q.mT).mT


def cross_covariance(layer, q, k, v, mask):
    logits = layer.temperature.double() * F.normalize(q, dim=-2).mT @ F.normalize(k, dim=-2)
    return logits, (logits.softmax(-1) @ v.mT).mT


DROPPED = dict(qkv_bias=False, qk_scale=0.7, attn_drop=0.5, proj_drop=0.5)
CASES = [
    Case(SpectralXCA, XCA, (D, HEADS), cross_covariance, variants=(dict(qkv_bias=True), dict(attn_drop=0.5))),
    Case(SpectralChannelAttention, ChannelAttention, (D, HEADS), channels, variants=({}, dict(qkv_bias=True))),
    Case(SpectralWindowMSA, WindowMSA, (D, WINDOW, HEADS), windows, True, ({}, DROPPED)),
    Case(SpectralDaViTWindowMSA, DaViTWindowMSA, (D, WINDOW, HEADS), windows, True, ({}, DROPPED)),
    Case(
        SpectralMultiheadAttention,
        MultiheadAttention,
        (D, HEADS),
        dot_product,
        variants=(
            {},
            dict(qkv_bias=False, proj_bias=False, layer_scale_init_value=0.1),
            dict(attn_drop=0.2, proj_drop=0.2, dropout_layer=dict(type="DropPath", drop_prob=0.2)),
        ),
    ),
]
EACH = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randomize(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


@EACH
def test_layers_are_drop_ins(case):
    """Built or adopted: the bits of mmpretrain's in training, its parameters and their names."""
    for kwargs in case.variants:
        stock = randomize(case.stock(*case.arguments, **kwargs))
        built = case.ours(*case.arguments, **kwargs)
        built.load_state_dict(stock.state_dict(), strict=True)
        layers, inputs = [stock, built, adopt(case.ours, stock)], case.inputs()
        for given in (inputs, inputs[:1]):
            outputs = []
            for layer in layers:
                torch.manual_seed(1)
                outputs.append(layer(*given))
            assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
        conditioned = adopt(case.ours, stock)
        condition_qkv(conditioned, build_conditioning(CONDITIONING))
        assert conditioned.qkv.weight is stock.qkv.weight and not hasattr(stock.qkv, "conditioning")
        assert list(conditioned.state_dict()) == list(stock.state_dict())
        copied = copy.deepcopy(conditioned)
        copied(*inputs).sum().backward()
        assert [name for name, p in copied.named_parameters() if p.grad is None] == []
    if case.ours is not SpectralDaViTWindowMSA:  # which is no part of the API
        assert MODELS.get(f"mmspectral.{case}") is case.ours
        assert list(conditioned_projections(case.ours(*case.arguments, conditioning=CONDITIONING))) == ["qkv"]


@pytest.mark.parametrize("targets", [(), ("q",), ("k", "v"), ("q", "k", "v")], ids="".join)
@EACH
def test_a_conditioned_layer_is_the_stated_function_of_three_separate_projections(case, targets):
    layer = case.build(CONDITIONING | dict(targets=targets) if targets else None, qkv_bias=True).double()
    x, *mask = case.inputs(torch.float64)
    projected = []
    for role, weight, bias in zip("qkv", layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True):
        weight = weight + 3.0 * (role in targets) * torch.eye(D, dtype=torch.float64)
        projected.append(F.linear(x, weight, bias).unflatten(-1, (HEADS, -1)).transpose(1, 2))
    logits, outputs = case.explicit(layer, *projected, *(mask or [None]))
    torch.testing.assert_close(layer.attention_logits(x, *mask), logits, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(layer(x, *mask), layer.proj(outputs.transpose(1, 2).flatten(2)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cast", [False, True], ids=["autocast", "cast"])
@EACH
def test_logits_stay_in_float32_in_low_precision(case, cast):
    """In cross-covariance attention what is multiplied has unit length, and the cosines are rounded to the dtype."""
    layer, (x, *mask), seen = case.build(CONDITIONING, qkv_bias=True), case.inputs(), {}
    if cast:
        layer, x = layer.bfloat16(), x.bfloat16()
    layer.qkv.register_forward_hook(lambda *args: seen.update(qkv=args[-1]))
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        logits, output = layer.attention_logits(x, *mask), layer(x, *mask)
    assert logits.dtype == torch.float32 and output.dtype == seen["qkv"].dtype == torch.bfloat16
    q, k, v = seen["qkv"].double().unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    exact, _ = case.explicit(layer, q, k, v, *([m.double() for m in mask] or [None]))
    cosines = case.ours is SpectralXCA
    torch.testing.assert_close(logits.double(), exact, rtol=0.01 if cosines else 1e-5, atol=0.01 if cosines else 1e-4)
    if case.masked:
        layer.softmax.register_forward_hook(lambda *args: seen.update(logits=args[1][0], attn=args[-1]))
        with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            layer(x, *mask)
        assert torch.equal(seen["logits"], logits) and seen["attn"].dtype == torch.float32


def test_fused_window_attention_is_as_exact_as_stock_in_low_precision():
    layer = randomize(SpectralDaViTWindowMSA(D, WINDOW, HEADS))
    x = torch.randn(4, 6, D)
    exact = copy.deepcopy(layer).double()(x.double())
    stock = DaViTWindowMSA(D, WINDOW, HEADS)
    stock.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        errors = [(module(x).double() - exact).norm() for module in (layer, stock)]
    assert errors[0] <= 2 * errors[1]


def test_channel_attention_of_many_tokens_in_float16():
    """A sum over the 4096 tokens of a detector's map exceeds the range of float16; stock gives nan there."""
    stock = ChannelAttention(16, 2)
    with torch.no_grad():
        stock.qkv.weight.copy_(torch.eye(16).repeat(3, 1))
    ours = adopt(SpectralChannelAttention, stock)
    x = 8 + torch.randn(1, 4096, 16)
    exact = ours(x)
    stock.half(), ours.half()
    assert not stock(x.half()).isfinite().all()
    assert (ours(x.half()).float() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("qk_scale", [0.2, 0.5])
def test_qk_scale_multiplies_the_logits(qk_scale):
    """mmpretrain ignores the value and multiplies them by sqrt(d), which an adopted layer keeps doing."""
    layer, stock = SpectralMultiheadAttention(D, HEADS, qk_scale=qk_scale), MultiheadAttention(D, HEADS, qk_scale=0.2)
    assert stock.scaled_dot_product_attention.func is scaled_dot_product_attention_pyimpl
    x = torch.randn(2, 11, D)
    adopted = adopt(SpectralMultiheadAttention, stock)
    torch.testing.assert_close(adopted(x), stock(x), rtol=1e-5, atol=1e-5)
    assert layer.scale == qk_scale and adopted.scale == pytest.approx((D / HEADS) ** 0.5)
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    _, outputs = dot_product(layer, q, k, v, None)
    torch.testing.assert_close(layer(x), layer.proj(outputs.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-5)


def test_stock_shifted_windows_take_the_layer():
    layer = ShiftWindowMSA(D, 3, 4, 2, window_msa=SpectralWindowMSA, conditioning=CONDITIONING)
    assert list(conditioned_projections(layer)) == ["w_msa.qkv"]
    assert layer(torch.randn(2, 6 * 7, D), (6, 7)).shape == (2, 42, D)


def test_a_map_smaller_than_the_window_is_padded_with_zeros():
    stock = ShiftWindowMSA(12, 2, window_size=4, shift_size=2)
    with pytest.raises(AssertionError, match="smaller than the window"):
        stock(torch.randn(2, 6, 12), (2, 3))
    layer = adopt(AnySizeShiftWindowMSA, stock)
    x = torch.randn(2, 2, 3, 12)
    window = torch.zeros(2, 4, 4, 12)
    window[:, :2, :3] = x
    expected = stock.w_msa(window.view(2, 16, 12)).view(2, 4, 4, 12)[:, :2, :3].reshape(2, 6, 12)
    assert torch.equal(layer(x.view(2, 6, 12), (2, 3)), expected)


def relative_entropy(cls, tokens, dim, scale, targets=("q", "k", "v"), **settings):
    torch.manual_seed(0)
    conditioning = dict(type="IdentityCorrection", scale=scale, targets=targets, **settings)
    layer = cls(dim, dim // 32, conditioning=conditioning)
    nn.init.trunc_normal_(layer.qkv.weight, std=0.02)
    with torch.no_grad():
        return saturation(layer.attention_logits(probe_tokens(tokens, dim, correlation=0.5))).relative_entropy


def test_channel_attention_saturates_unless_only_q_is_conditioned_and_cross_covariance_never():
    """The table in the docstring of SpectralChannelAttention, and why channel_conditioning is None by default."""
    first, last = (SpectralChannelAttention, 3136, 96), (SpectralChannelAttention, 49, 768)
    measured = [
        [relative_entropy(*stage, **settings) for settings in (dict(scale=0.0), dict(scale=1.0), dict(scale=10.0))]
        + [relative_entropy(*stage, scale=10.0, preserve_norm=0.02)]
        for stage in (first, last)
    ]
    assert measured[0] == pytest.approx([0.31, 0.004, 0.0, 0.07], abs=0.015)
    assert measured[1] == pytest.approx([0.81, 0.32, 0.001, 0.78], abs=0.015)
    assert relative_entropy(*first, scale=10.0, targets=("q",)) == measured[0][0]
    assert relative_entropy(SpectralXCA, 400, 96, scale=10.0) > 0.95

"""Counts of multiply-adds against torch's own counter, formulas by hand and published figures."""

from functools import partial
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmspectral.analysis.complexity import Complexity, count_complexity, count_config
from mmspectral.analysis.stock_twins import DenseBackbone
from mmspectral.ops.random_features import attend, draw_projection, fold_features, linear_attention, summarise_keys
from mmspectral.ops.random_features.causal import forward as causal_forward
from mmspectral.ops.random_features.chunked import KeyMap

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PLAIN = dict(embed_dims=32, num_layers=4, num_heads=4, feedforward_channels=64)
PYRAMID = dict(embed_dims=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8])  # d is 16 in every stage
MAPS = ((3136, 16, 1), (784, 32, 1), (196, 64, 2), (49, 128, 1))  # N, D and depth of its stages at 224 pixels
IN_WINDOWS = sum(2 * depth * N * 49 * D for N, D, depth in MAPS)
OF_CHANNELS = sum(2 * depth * N * D * 16 for N, D, depth in MAPS)
BACKBONES = {  # architecture, and the products of q, k, v by hand: 2 N^2 D a layer, N D d in the channel form
    "vit": (PLAIN, 4 * 2 * 197**2 * 32),
    "deit": (PLAIN, 4 * 2 * 198**2 * 32),
    "swin": (PYRAMID, IN_WINDOWS),
    "davit": (PYRAMID, IN_WINDOWS + OF_CHANNELS),
    "xcit": (dict(embed_dims=32, depth=4, num_heads=4), 4 * 2 * 196 * 32 * 8),
}
# Multiply-adds of which torch's counter has no notion.
NOT_PRODUCTS = ("batch_norm", "layer_norm", "adaptive_avg_pool2d")


class Call(nn.Module):
    """A function of one tensor, as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def counted(function, x):
    return count_complexity(Call(function), x)


def by_torch(function, *args):
    """Multiply-adds of every product, SDPA taken apart, by torch's own counter."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("family", BACKBONES)
def test_backbones_have_every_product(family):
    arch, attention = BACKBONES[family]
    model = DenseBackbone(family, arch).conditioned(dict(type="IdentityCorrection", scale=0.1))
    model.eval()
    x = torch.rand(1, 3, 224, 224)
    complexity = count_complexity(model, x)
    operators = complexity.operators
    assert operators["scaled_dot_product_attention"] + operators["matmul"] == attention
    products = operators.total() - sum(operators[name] for name in NOT_PRODUCTS)
    assert products == by_torch(model, x)
    assert complexity.total.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "published"),
    [  # "FLOPs" of mmpretrain's metafiles: of the backbone, in multiply-adds
        ("deit/deit-tiny_4xb256_in1k.py", 1_258_219_200),
        ("xcit/spectral-xcit-tiny-12-p16_8xb128_in1k.py", 1_239_698_112),
    ],
)
def test_published_figures(config, published):
    complexity = count_config(Config.fromfile(CONFIGS / config), (224, 224))
    assert complexity.input_shape == (1, 3, 224, 224)
    assert complexity.parts["backbone"].multiply_adds == published
    assert sum(part.multiply_adds for part in complexity.parts.values()) == complexity.total.multiply_adds


@pytest.mark.parametrize(("heads", "causal"), [(4, False), (2, False), (4, True)])
def test_scaled_dot_product_attention(heads, causal):
    B, h, N, L, d, e = 2, 4, 6, 6 if causal else 9, 8, 5
    k, v = torch.rand(B, heads, L, d), torch.rand(B, heads, L, e)
    attention = partial(F.scaled_dot_product_attention, key=k, value=v, is_causal=causal, enable_gqa=heads < h)
    complexity = counted(attention, torch.rand(B, h, N, d))
    assert complexity.total == Complexity(0, B * h * N * L * (d + e), B * h * N * e)


@pytest.mark.parametrize(
    "feature_heads, heads, rank, orthogonal",
    [(4, 4, 8, False), (1, 4, 8, True), (2, 2, 8, False), (4, 2, 8, False), (4, 4, 3, False)],
)
def test_linear_attention_is_what_its_two_steps_multiply(feature_heads, heads, rank, orthogonal):
    q, k, v = torch.rand(2, 4, 700, 8), torch.rand(2, heads, 300, 8), torch.rand(2, heads, 300, 5)
    M = None if orthogonal else torch.rand(feature_heads, rank, 8)
    features = fold_features(draw_projection(16, rank, seed=0), M, 8, orthogonal=orthogonal)
    complexity = counted(lambda q: linear_attention(q, k, v, features), q)
    if feature_heads > heads:
        k, v = (t.repeat_interleave(feature_heads // heads, 1) for t in (k, v))
    assert complexity.total.multiply_adds == by_torch(lambda: attend(q, features, summarise_keys(k, v, features)))
    assert complexity.total.activations == 2 * 4 * 700 * 5


@pytest.mark.parametrize("N", [1, 5, 128, 300])
@pytest.mark.parametrize("heads", [2, 1])
def test_causal_attention_is_what_its_scan_multiplies(N, heads):
    q, k, v = torch.rand(2, 2, N, 8), torch.rand(2, heads, N, 8), torch.rand(2, heads, N, 5)
    features = fold_features(draw_projection(16, 8, seed=0), torch.rand(heads, 8, 8), 8)
    complexity = counted(lambda q: linear_attention(q, k, v, features, causal=True), q)
    grouped = q.unflatten(1, (heads, -1))
    out = torch.empty(*grouped.shape[:-1], 5)
    expected = by_torch(causal_forward, grouped, k, v, KeyMap(features, 2, heads), None, out)
    assert complexity.total.multiply_adds == expected


def test_products_that_mmengine_counts_wrong_or_not_at_all():
    batch, bias = torch.rand(7, 4, 5), torch.rand(7, 3, 5)
    assert counted(lambda x: x @ batch, torch.rand(3, 4)).total.multiply_adds == 7 * 3 * 4 * 5
    baddbmm = counted(lambda x: torch.baddbmm(bias, x, batch), torch.rand(7, 3, 4))
    assert baddbmm.total == Complexity(0, 7 * 3 * 4 * 5, 7 * 3 * 5)
    assert baddbmm.uncounted == {}


def test_the_fused_encoder_layer_is_taken_apart_and_left_as_it_was():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.rand(1, 5, 8)
    operators = count_complexity(layer, x).operators
    assert operators.total() == 5 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 5 * 5 * 8 + operators["layer_norm"]
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_no_part_does_is_the_rest():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.by_method, self.idle = nn.Linear(4, 3), nn.Linear(3, 2), nn.Identity()

        def forward(self, x):
            return F.gelu(self.by_method.forward(self.called(x)))

    complexity = count_complexity(Model(), torch.rand(5, 4))
    assert complexity.parts == {
        "called": Complexity(15, 60, 15),
        "by_method": Complexity(8, 0, 0),
        "rest": Complexity(0, 30, 10),
    }
    assert complexity.total == Complexity(23, 90, 25)
    assert complexity.uncounted == {"aten::gelu": 1}

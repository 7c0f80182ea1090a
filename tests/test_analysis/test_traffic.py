"""Bytes and launches: the counter itself, and the ratios that conditioning must keep."""

import pytest
import torch

from mmspectral.analysis import DenseBackbone, backbone_traffic, count_traffic, ratios

CONDITIONING = dict(type="IdentityCorrection", scale=10.0, scope="full")
PLAIN = dict(embed_dims=384, num_layers=2, num_heads=6, feedforward_channels=1536)
STAGES = dict(embed_dims=96, depths=[1, 1, 1, 1], num_heads=[3, 6, 12, 24])
SHALLOW = {
    "xcit": dict(embed_dims=384, depth=2, num_heads=8),
    "swin": STAGES,
    "vit": PLAIN,
    "deit": PLAIN,
    "davit": STAGES,
}
FULL = [pytest.param(family, None, marks=pytest.mark.slow) for family in SHALLOW]


def test_counts_operators_and_bytes_but_no_views():
    x, y, target = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.float64), torch.empty(4, 6)
    step = count_traffic(lambda: (x.t() @ y.float()).sum())
    assert step.launches == 3
    assert step.read == 4 * 24 + 4 * 24 + 8 * 24 + 4 * 36
    assert step.written == 4 * 24 + 4 * 36 + 4
    assert step.flops == 2 * 6 * 4 * 6
    copied = count_traffic(lambda: target.copy_(x[:1].expand(4, 6)))
    assert (copied.launches, copied.read, copied.written) == (1, 4 * 6, 4 * 24)


def test_operators_of_this_package_are_counted_by_what_they_call():
    from mmspectral.ops import draw_projection, fold_features, linear_attention

    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    features = fold_features(draw_projection(16, 8, seed=0), None, 8)
    counted = count_traffic(lambda: linear_attention(q, q, q, features).sum().backward())
    assert counted.launches > 20
    assert counted.flops >= 4 * 2 * 2 * 64 * 16 * 8


@pytest.mark.parametrize(("family", "arch"), [*SHALLOW.items(), *FULL])
def test_conditioning_is_free_in_mixed_precision(family, arch):
    """Two images of 448 pixels under bfloat16 autocast."""
    backbone = DenseBackbone(family, arch, (448, 448))
    models = [backbone.stock(), backbone.conditioned(None), backbone.conditioned(CONDITIONING)]
    stock, ours, conditioned = (backbone_traffic(model, (2, 3, 448, 448), "bf16") for model in models)
    over_stock, over_ours = ratios(ours, stock), ratios(conditioned, ours)
    assert over_ours["bytes"] <= 1.01
    assert over_ours["launches"] <= 1.05
    assert over_stock["bytes"] <= 1.04
    assert over_stock["launches"] <= (1.08 if family == "xcit" else 1.02)

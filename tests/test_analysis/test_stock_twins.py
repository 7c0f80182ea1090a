"""The models that overheads are measured on: the same function, weights and work, but for the correction."""

import pytest
import torch

from mmspectral.analysis.stock_twins import FAMILIES, DenseBackbone
from mmspectral.layers import replaced_projections

STAGES = dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4])
PLAIN = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64)
ARCHS = dict(xcit=dict(embed_dims=32, depth=2, num_heads=4), swin=STAGES, vit=PLAIN, deit=PLAIN, davit=STAGES)
IDENTITY = dict(type="IdentityCorrection", scale=10.0)


@pytest.fixture(params=FAMILIES)
def backbone(request):
    torch.manual_seed(0)
    return DenseBackbone(request.param, ARCHS[request.param], (64, 96))


def maps(model):
    return model(torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1)))


def module_types(model):
    return {name: type(module) for name, module in model.named_modules()}


def test_stock_is_bit_equal_to_ours_without_a_correction(backbone):
    ours = backbone.conditioned(None).eval()
    stock, alone = backbone.stock(ours), backbone.stock()
    assert type(stock) is FAMILIES[backbone.family].stock and module_types(alone) == module_types(stock)
    stock.eval()
    with torch.no_grad():
        assert all(
            out.ndim == 4 and torch.equal(out, other) for out, other in zip(maps(ours), maps(stock), strict=True)
        )


def test_folded_is_the_conditioned_function_in_modules_of_stock(backbone):
    ours = backbone.conditioned(IDENTITY)
    ours.eval()
    stock = backbone.stock(ours)
    stock.eval()
    qkv = [name for name, _ in stock.named_modules() if name.endswith("qkv")]
    assert list(replaced_projections(ours)) == qkv  # no attention left out
    with torch.no_grad():
        expected, plain = maps(ours), maps(stock)
        folded = backbone.folded(ours)
        folded.eval()
        found = maps(folded)
    assert module_types(folded) == module_types(stock)
    for a, b, c in zip(found, expected, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
        assert (c - b).norm() > 0.01 * b.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_default_sizes_fit_mmpretrains(family):
    backbone = DenseBackbone(family)
    ours = backbone.conditioned(None)
    stock = backbone.stock(ours)
    counts = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (ours, stock)]
    assert counts[0] == counts[1] > 20e6

"""Which matrices the q, k and v projections are, for every kind of conditioning and for none."""

import cv2
import pytest
import torch
from mmpretrain.models.backbones import XCiT
from torch import nn

from mmspectral.analysis import (
    attention_projections,
    plot_projection_conditions,
    projection_conditions,
    spectrum,
    spread,
)
from mmspectral.layers import build_conditioning, condition_linear
from mmspectral.layers.alternatives import QKNorm, SpectralNorm
from mmspectral.layers.packed_attention import ConditionedMultiheadAttention
from mmspectral.models import SpectralXCiT


def attention(conditioning, row_order="[3][heads][d]"):
    torch.manual_seed(0)
    layer = nn.Module()
    layer.num_heads = 2
    layer.qkv = nn.Linear(8, 24)
    condition_linear(layer, "qkv", build_conditioning(conditioning), ("q", "k", "v"), 2, row_order)
    return layer


def kappa(matrix):
    return torch.linalg.cond(matrix.detach().double()).item()


def test_spectrum_of_known_matrices():
    found = spectrum(torch.diag(torch.tensor([4.0, 2.0, 0.5])).double())
    assert (found.sigma_max, found.sigma_min, found.kappa, found.rank_deficient) == (4, 0.5, 8, False)
    heads = spectrum(torch.stack([torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([10.0, 5.0]))]))
    assert (heads.sigma_max, heads.sigma_min, heads.kappa) == (10, 1, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rank_deficient_and_non_finite_matrices_have_no_kappa(dtype):
    singular = spectrum(torch.ones(6, 4, dtype=dtype))
    assert singular.rank_deficient and singular.sigma_max == pytest.approx(24**0.5)
    assert spectrum(torch.zeros(3, 3, dtype=dtype)).rank_deficient
    broken = spectrum(torch.tensor([[1.0, torch.nan], [0.0, 1.0]], dtype=dtype))
    assert broken.kappa != broken.kappa and not broken.rank_deficient


@pytest.mark.parametrize("scope", ["full", "head"])
@pytest.mark.parametrize("row_order", ["[3][heads][d]", "[heads][3][d]"])
def test_identity_in_every_layout(scope, row_order):
    layer = attention(dict(type="IdentityCorrection", scale=3.0, scope=scope, targets=["q", "v"]), row_order)
    weight = layer.qkv.weight.double()
    blocks = weight.view(3, 2, 4, 8) if row_order.startswith("[3]") else weight.view(2, 3, 4, 8).transpose(0, 1)
    (projection,) = attention_projections(layer).values()
    for p, (role, (before, after)) in enumerate(projection.spectra().items()):
        corrected = 0.0 if role == "k" else 3.0
        if scope == "full":
            matrix = blocks[p].reshape(8, 8)
            expected = kappa(matrix), kappa(matrix + corrected * torch.eye(8))
        else:
            expected = (
                max(kappa(head) for head in blocks[p]),
                max(kappa(head + corrected * torch.eye(4, 8)) for head in blocks[p]),
            )
        assert (before.kappa, after.kappa) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("interval", [1, 5])
def test_corrections_that_follow_from_the_weight(interval):
    layer = attention(dict(type="SVDCorrection", interval=interval))
    spectra = next(iter(attention_projections(layer).values())).spectra()
    for before, after in spectra.values():
        assert before.kappa > 4 and after.kappa <= 2
    if interval > 1:  # the stored C is what counts, not the one that the weight would give now
        with torch.no_grad():
            layer.qkv.weight.neg_()
        after = next(iter(attention_projections(layer).values())).spectra()["q"][1]
        assert after.kappa > 4


def test_switches_are_measured_by_the_weight_that_they_multiply_by():
    (projection,) = attention_projections(attention(SpectralNorm())).values()
    before, after = projection.spectra()["q"]
    assert after.kappa == pytest.approx(before.kappa, rel=1e-6) and after.sigma_max != before.sigma_max
    (projection,) = attention_projections(attention(QKNorm())).values()
    before, after = projection.spectra()["q"]
    assert before == after


@pytest.mark.parametrize("separate", [False, True])
def test_multihead_attention_of_torch(separate):
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, **(dict(kdim=6, vdim=5) if separate else {}))
    conditioned = ConditionedMultiheadAttention(stock, build_conditioning(dict(type="IdentityCorrection", scale=10.0)))
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"] if separate else ["in_proj_weight"]
    model = nn.ModuleDict(dict(plain=stock, conditioned=conditioned))
    found = attention_projections(model)
    assert list(found) == [f"{part}.{name}" for part in model for name in names]
    plain, corrected = (found[f"{part}.{names[0]}"].spectra()["q"] for part in model)
    query = stock.q_proj_weight if separate else stock.in_proj_weight[:8]
    assert plain[0] == plain[1] == corrected[0]
    assert plain[0].kappa == pytest.approx(kappa(query), rel=1e-9)
    assert corrected[1].kappa == pytest.approx(kappa(query + 10 * torch.eye(8)), rel=1e-6)


class Odd(nn.Module):
    """A fused projection that is not three times as wide as its input."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 20)


class Grouped(nn.Module):
    """Separate projections with fewer heads for k and v, as in language models."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)


def test_stock_backbones_are_found_by_their_names():
    model = XCiT(patch_size=8, embed_dims=16, depth=2, num_heads=2, cls_attn_layers=1)
    assert list(attention_projections(model)) == [
        *(f"xca_layers.{i}.attn.qkv" for i in range(2)),
        *(f"ca_layers.0.attn.{role}" for role in "qkv"),
    ]
    assert attention_projections(nn.Sequential(nn.Linear(3, 9))) == {}
    found = attention_projections(nn.ModuleDict(dict(odd=Odd(), grouped=Grouped())))
    assert {name: p.layout.num_heads for name, p in found.items()} == {
        "grouped.q_proj": 4,
        "grouped.k_proj": 2,
        "grouped.v_proj": 2,
    }


def test_gradient_norms_by_role():
    layer = attention(dict(type="IdentityCorrection"))
    (projection,) = attention_projections(layer).values()
    assert projection.gradient_norms() == {}
    layer.qkv(torch.randn(4, 8)).square().sum().backward()
    expected = {role: block.norm().item() for role, block in zip("qkv", layer.qkv.weight.grad.split(8), strict=True)}
    assert projection.gradient_norms() == pytest.approx(expected)


def xcit(conditioning):
    torch.manual_seed(0)
    model = SpectralXCiT(arch=dict(embed_dims=64, depth=2, num_heads=4), patch_size=8, conditioning=conditioning)
    model.init_weights()
    return model


@pytest.mark.parametrize("scope", ["full", "head"])
def test_every_projection_is_listed_with_the_kappa_of_its_scope(scope):
    model = xcit(dict(type="IdentityCorrection", scale=10.0, scope=scope))
    rows = projection_conditions(model)
    assert [(row.layer, row.role) for row in rows] == [
        (f"xca_layers.{i}.attn.qkv", role) for i in range(2) for role in "qkv"
    ]
    query = model.xca_layers[0].attn.qkv.weight[:64].double()
    correction = 10 * torch.eye(64, dtype=torch.float64)
    if scope == "head":
        query, correction = query.view(4, 16, 64), 10 * torch.eye(16, 64, dtype=torch.float64)
    assert rows[0].kappa_without == pytest.approx(torch.linalg.cond(query).max().item())
    assert rows[0].kappa_with == pytest.approx(torch.linalg.cond(query + correction).max().item())
    assert all(row.kappa_with < 1.1 < row.kappa_without for row in rows)


def test_rank_deficient_projection_is_infinite():
    model = xcit(dict(type="IdentityCorrection"))
    with torch.no_grad():
        model.xca_layers[0].attn.qkv.weight[:64] = 1.0
    assert projection_conditions(model)[0].kappa_without == float("inf")


def test_plot_is_a_picture_and_needs_something_to_draw(tmp_path):
    plot_projection_conditions(
        projection_conditions(xcit(dict(type="IdentityCorrection"))), str(tmp_path / "kappa.png"), "title"
    )
    assert cv2.imread(str(tmp_path / "kappa.png")).std() > 5
    with pytest.raises(ValueError, match="no conditioned projection"):
        plot_projection_conditions(projection_conditions(xcit(None)), str(tmp_path / "empty.png"))


@pytest.mark.parametrize(
    ("count", "expected"), [(1, "a"), (2, "ae"), (3, "ace"), (4, "abde"), (5, "abcde"), (9, "abcde")]
)
def test_spread(count, expected):
    assert "".join(spread("abcde", count)) == expected
    with pytest.raises(ValueError, match="at least one"):
        spread("abcde", 0)

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_spectrum_is_of_the_worst_head_and_has_no_kappa_if_singular_or_not_finite(dtype):
    heads = spectrum(torch.stack([torch.diag(torch.tensor(s, dtype=dtype)) for s in ([3.0, 1.0], [10.0, 5.0])]))
    assert (heads.sigma_max, heads.sigma_min, heads.kappa, heads.sigma.tolist()) == (10, 1, 3, [3, 1])
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
        matrices = blocks[p].reshape(1, 8, 8) if scope == "full" else blocks[p]
        eye = corrected * torch.eye(*matrices.shape[1:])
        expected = max(map(kappa, matrices)), max(map(kappa, matrices + eye))
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


class Attention(nn.Module):
    """Separate projections, or fused ones in [3][heads][d] or, as in TinyViT, [heads][3][d]."""

    def __init__(self, heads_first=None, kv_heads=2):
        super().__init__()
        self.num_heads, self.kv_heads, self.heads_first = 2, kv_heads, heads_first
        if heads_first is None:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 4 * heads) for heads in (2, kv_heads, kv_heads))
        else:
            self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        if self.heads_first is None:
            q, k, v = (p(x).unflatten(-1, (-1, 4)) for p in (self.q_proj, self.k_proj, self.v_proj))
            k, v = (t.repeat_interleave(2 // self.kv_heads, 2) for t in (k, v))
        elif self.heads_first:
            q, k, v = self.qkv(x).unflatten(-1, (2, 3, 4)).unbind(-2)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Broken(Attention):
    def forward(self, x):
        raise NotImplementedError


def test_stock_projections_are_those_whose_rows_are_certain():
    model = XCiT(patch_size=8, embed_dims=16, depth=2, num_heads=2, cls_attn_layers=1)
    assert list(attention_projections(model)) == [
        *(f"xca_layers.{i}.attn.qkv" for i in range(2)),
        *(f"ca_layers.0.attn.{role}" for role in "qkv"),
    ]
    assert attention_projections(nn.Sequential(nn.Linear(3, 9))) == {}
    left_out = {}
    layers = dict(fused=Attention(False), tiny=Attention(True), grouped=Attention(kv_heads=1), broken=Broken(False))
    found = attention_projections(nn.ModuleDict(layers), left_out)
    assert {name: (each.layout.num_heads, each.layout.row_order[1]) for name, each in found.items()} == {
        "fused.qkv": (2, "3"),
        "tiny.qkv": (2, "h"),
        "grouped.q_proj": (2, "3"),
        "grouped.k_proj": (1, "3"),
        "grouped.v_proj": (1, "3"),
    }
    assert list(left_out) == ["broken"] and left_out["broken"].startswith("broken.qkv: ")


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
def test_every_projection_of_a_model_and_of_its_twin_has_the_kappa_of_the_scope(scope):
    model = xcit(dict(type="IdentityCorrection", scale=10.0, scope=scope))
    rows = projection_conditions(model)
    names = [(f"xca_layers.{i}.attn.qkv", role) for i in range(2) for role in "qkv"]
    assert [(row.layer, row.role) for row in rows] == names
    assert (rows[1].with_.sigma[0] / rows[1].with_.sigma[-1]).item() == pytest.approx(rows[1].kappa_with)
    assert all(row.kappa_with < 1.1 < row.kappa_without for row in rows)
    assert projection_conditions(xcit(None)) == []
    found = attention_projections(model)
    twin = projection_conditions(xcit(None), {row.layer: found[row.layer] for row in rows})
    assert [(row.without, row.kappa_with) for row in twin] == [(row.without, None) for row in rows]
    with pytest.raises(ValueError, match="no attention projection xca_layers.0.attn.qkv"):
        projection_conditions(nn.Linear(3, 3), attention_projections(model))


def test_plot_is_a_picture_and_needs_something_to_draw(tmp_path):
    plot_projection_conditions(
        projection_conditions(xcit(dict(type="IdentityCorrection"))), str(tmp_path / "kappa.png"), "title"
    )
    assert cv2.imread(str(tmp_path / "kappa.png")).std() > 5
    with pytest.raises(ValueError, match="no conditioned projection"):
        plot_projection_conditions(projection_conditions(xcit(None)), str(tmp_path / "empty.png"))


def test_spread():
    expected = {1: "a", 2: "ae", 3: "ace", 4: "abde", 5: "abcde", 9: "abcde"}
    assert {count: "".join(spread("abcde", count)) for count in expected} == expected
    with pytest.raises(ValueError, match="count"):
        spread("abcde", 0)

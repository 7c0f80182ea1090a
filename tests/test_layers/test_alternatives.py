"""What each alternative to a correction computes, against naive twins in float64 and torch's own spectral norm."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from mmspectral.layers import QKNorm, build_conditioning, condition_linear
from mmspectral.layers.alternatives import SpectralNormLinear
from mmspectral.ops import ProjectionLayout
from tests.test_layers.test_projection import (
    ALTERNATIVES,
    DIVISIONS,
    HEADS,
    ROLES,
    ROW_ORDERS,
    Attention,
    D,
    E,
    each,
    tokens,
    train,
)


def by_role(fused, row_order):
    """Split rows (the last but one dimension of a weight, the last of outputs, put first here) by q, k, v."""
    d = D // HEADS
    if row_order == "[3][heads][d]":
        parts = fused.unflatten(0, (3, HEADS, d)).unbind(0)
    else:
        parts = fused.unflatten(0, (HEADS, 3, d)).unbind(1)
    return {role: part.flatten(0, 1) for role, part in zip(ROLES, parts, strict=True)}


@ROW_ORDERS
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_qk_norm_equals_its_naive_twin(norm, row_order):
    model = Attention(dict(type="QKNorm", norm=norm), row_order)
    stock = Attention(None, row_order)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
    x = tokens()
    fused = by_role(model.qkv(x).movedim(-1, 0), row_order)
    plain = by_role(stock.qkv(x).movedim(-1, 0), row_order)
    for role in ("q", "k"):
        for head in range(HEADS):
            rows = slice(head * D // HEADS, (head + 1) * D // HEADS)
            for projection, ours, theirs in (
                (model.qkv, fused[role][rows].movedim(0, -1), plain[role][rows].movedim(0, -1)),
                (model.get_submodule(role), getattr(model, role)(x)[..., rows], getattr(stock, role)(x)[..., rows]),
            ):
                gain = projection.get_submodule(f"{role}_norm").weight
                centred = theirs - theirs.mean(-1, keepdim=True) if norm == "layer" else theirs
                expected = gain * centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(fused["v"], plain["v"])
    assert type(model.v) is nn.Linear
    assert isinstance(model.qkv.q_norm, (nn.LayerNorm, nn.RMSNorm)), "what `norm_decay_mult` looks for"
    assert model.qkv.bfloat16().q_norm(x[..., : D // HEADS].bfloat16()).dtype == torch.float32


def test_qk_norm_equals_timms():
    timm = pytest.importorskip("timm")
    theirs = timm.layers.Attention(
        E, HEADS, qkv_bias=True, qk_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-6, bias=False)
    ).eval()
    ours = timm.layers.Attention(E, HEADS, qkv_bias=True).eval()
    condition_linear(ours, "qkv", QKNorm(), ROLES, HEADS, "[3][heads][d]")
    with torch.no_grad():
        for norm in (theirs.q_norm, theirs.k_norm):
            norm.weight.uniform_(0.5, 2)
    state = theirs.state_dict()
    ours.load_state_dict(
        {(f"qkv.{name}" if name.startswith(("q_norm", "k_norm")) else name): tensor for name, tensor in state.items()},
        strict=True,
    )
    x = tokens(torch.float32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@ROW_ORDERS
def test_fused_spectral_norm_trains_as_three_of_torchs(row_order):
    """The twin is torch.nn.utils.parametrizations.spectral_norm on separate projections."""
    fused = Attention(dict(type="SpectralNorm"), row_order).qkv

    class Separate(nn.ModuleDict):
        def forward(self, x):
            return torch.cat([projection(x) for projection in self.values()], dim=-1)

    class Fused(nn.Sequential):
        def forward(self, x):
            outputs = by_role(super().forward(x).movedim(-1, 0), row_order)
            return torch.cat(list(outputs.values())).movedim(0, -1)

    separate = Separate({role: nn.Linear(E, D, dtype=torch.float64) for role in ROLES})
    for name in ("weight", "bias"):
        for role, rows in by_role(getattr(fused, name).detach(), row_order).items():
            getattr(separate[role], name).data.copy_(rows)
    for p, role in enumerate(ROLES):
        theirs = spectral_norm(separate[role]).parametrizations.weight[0]
        theirs._u.copy_(fused.left[p])
        theirs._v.copy_(fused.right[p])

    train([separate, Fused(fused)], steps=10)
    for role, weight in by_role(fused.weight, row_order).items():
        theirs = separate[role].parametrizations.weight
        torch.testing.assert_close(weight, theirs.original, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fused.left[ROLES.index(role)], theirs[0]._u, rtol=1e-10, atol=1e-10)


@ROW_ORDERS
@each(DIVISIONS)
def test_each_projection_is_divided_by_its_own_largest_singular_value(cfg, row_order):
    """The criterion is each block's, not the fused matrix's."""
    model = Attention(cfg, row_order).qkv
    with torch.no_grad():
        for factor, block in zip((1.0, 5.0, 0.2), model.layout.split(model.weight, "head"), strict=True):
            block.mul_(factor)
    model.init_weights()
    effective = by_role(model.effective_weight().detach(), row_order)
    for p, (role, weight) in enumerate(by_role(model.weight.detach(), row_order).items()):
        sigma = torch.linalg.svdvals(weight)[0]
        gamma = model.gamma[p].detach() if cfg["type"] == "SigmaReparam" else 1.0
        torch.testing.assert_close(effective[role], gamma * weight / sigma, rtol=1e-3, atol=0)
        if cfg.get("gamma", 1.0) is None:
            torch.testing.assert_close(effective[role], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows, columns", [(384, 384), (64, 256), (256, 64)])
def test_the_start_finds_the_largest_singular_value_to_two_per_cent(rows, columns):
    torch.manual_seed(0)
    for shape in ("normal", "decaying"):
        linear = nn.Linear(columns, rows, bias=False)
        nn.init.normal_(linear.weight, std=0.02)
        if shape == "decaying":
            u, s, v = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
            linear.weight.data = u @ torch.diag(s[0] / torch.arange(1, len(s) + 1)) @ v
        exact = torch.linalg.svdvals(linear.weight.detach())[0]
        ours = SpectralNormLinear(linear, build_conditioning(dict(type="SpectralNorm")), ProjectionLayout(("q",), 4))
        assert 0.99 * exact < ours.sigma().item() <= exact * (1 + 1e-5)


@pytest.mark.parametrize("targets", [("q",), ("k", "v")])
@ROW_ORDERS
@each(ALTERNATIVES)
def test_other_projections_are_left_alone(cfg, row_order, targets):
    targets = targets[:1] if cfg["type"] == "QKNorm" else targets
    model = Attention(dict(cfg, targets=targets), row_order)
    stock = Attention(None, row_order)
    ours, theirs = (by_role(m.qkv(tokens()).movedim(-1, 0), row_order) for m in (model, stock))
    for role in ROLES:
        same = role not in targets or cfg.get("gamma", 1.0) is None
        assert torch.allclose(ours[role], theirs[role], rtol=1e-2 if same else 1e-12) == same
        assert (type(getattr(model, role)) is nn.Linear) == (role not in targets)


@each(DIVISIONS)
def test_two_forwards_before_one_backward(cfg):
    """torch's in-place power method once broke the first forward's graph (note in torch/nn/utils/spectral_norm.py)."""
    model = Attention(cfg)
    (model(tokens()) - model(2 * tokens())).sum().backward()
    assert model.qkv.weight.grad.isfinite().all()


@each(DIVISIONS)
def test_the_power_method_follows_training(cfg):
    model = Attention(cfg)
    train([model], steps=20)
    model(tokens())
    exact = torch.stack([torch.linalg.svdvals(w)[0] for w in model.qkv.layout.split(model.qkv.weight)])
    torch.testing.assert_close(model.qkv.sigma(), exact, rtol=1e-3, atol=0)


def test_gamma_of_a_checkpoint_without_vectors_is_kept():
    cfg = dict(type="SigmaReparam", gamma=None)
    model, other = Attention(cfg), Attention(cfg)
    with torch.no_grad():
        model.qkv.gamma.copy_(torch.tensor([1.0, 2.0, 3.0]))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    missing, _ = other.load_state_dict(parameters, strict=False)
    assert {name.rpartition(".")[2] for name in missing} == {"left", "right"}
    assert other.qkv.gamma.tolist() == [1.0, 2.0, 3.0]


@each(DIVISIONS)
def test_zero_weights_give_zero_and_recover(cfg):
    model = Attention(dict(cfg))
    with torch.no_grad():
        model.qkv.weight.zero_()
        model.qkv.bias.zero_()
    model.qkv.init_weights()
    assert not model.qkv(tokens()).any()
    model.qkv(tokens()).sum().backward()
    assert model.qkv.weight.grad.isfinite().all()
    with torch.no_grad():
        model.qkv.weight.copy_(Attention().qkv.weight)
    model.qkv(tokens())
    assert (model.qkv.sigma() > 0).all()


@ROW_ORDERS
def test_orthogonal_start_is_of_each_projection_with_the_gain(row_order):
    model = Attention(dict(type="OrthogonalInit", gain=0.5, targets=("q", "v")), row_order)
    stock = Attention(None, row_order)
    for role in ("q", "v"):
        for weight in (by_role(model.qkv.weight.detach(), row_order)[role], getattr(model, role).weight.detach()):
            expected = 0.25 * torch.eye(D, dtype=torch.float64)
            torch.testing.assert_close(weight @ weight.T, expected, rtol=0, atol=1e-12)
    assert torch.equal(by_role(model.qkv.weight, row_order)["k"], by_role(stock.qkv.weight, row_order)["k"])
    assert torch.equal(model.qkv.bias, stock.qkv.bias) and type(model.k) is nn.Linear
    x = tokens()
    assert torch.equal(model.qkv(x), F.linear(x, model.qkv.weight, model.qkv.bias))


def test_orthogonal_start_of_bfloat16_and_rectangular_weights():
    for rows, columns in ((24, 12), (8, 12)):
        linear = nn.Linear(columns, rows, dtype=torch.bfloat16)
        build_conditioning(dict(type="OrthogonalInit", gain=2.0)).replace(linear, ProjectionLayout(("q",), 2))
        sigma = torch.linalg.svdvals(linear.weight.detach().float())
        torch.testing.assert_close(sigma, torch.full_like(sigma, 2.0), rtol=0.01, atol=0)

"""What corrections compute in a projection, and when a C that follows from W changes."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

from mmspectral import ops
from mmspectral.layers import (
    ConditionedLinear,
    IdentityCorrection,
    PolarCorrection,
    SVDCorrection,
    fold,
    refresh_corrections,
    unfold,
)
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.conditioning import reference
from tests.test_layers.test_projection import Attention, tokens

CORRECTIONS = [SVDCorrection, PolarCorrection]
LAYOUTS = list(itertools.product(ops.ROW_ORDERS, ops.SCOPES, [(2, 3, 6), (2, 4, 5), (3, 2, 9)]))


def make(conditioning, dtype=torch.float32):
    return Attention(conditioning, dtype=dtype), tokens(dtype)


def step(model, x, refresh_at=None):
    """One update by hand, with a refresh before it if that is due."""
    if refresh_at is not None:
        refresh_corrections(model, updates=refresh_at)
    model.zero_grad()
    model(x).sin().square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize(("order", "scope", "shape"), LAYOUTS)
@pytest.mark.parametrize("targets", [("q",), ("k", "v"), ("q", "k", "v")])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_each_matrix_of_the_scope_is_conditioned_by_itself(kind, interval, targets, order, scope, shape):
    torch.manual_seed(0)
    heads, d, columns = shape
    layout = ProjectionLayout(("q", "k", "v"), heads, order)
    conditioning = kind(scope=scope, targets=targets, interval=interval)
    linear = ConditionedLinear(nn.Linear(columns, 3 * heads * d, dtype=torch.float64), conditioning, layout)
    W, effective = (layout.split(w.detach(), scope) for w in (linear.weight, linear.effective_weight()))
    for p, role in enumerate(layout.roles):
        if role not in targets:
            assert torch.equal(effective[p], W[p])
            continue
        assert (ops.condition_number(effective[p]) <= 2.05).all()
        for w, e in zip(W[p].reshape(-1, *W.shape[-2:]), effective[p].reshape(-1, *W.shape[-2:]), strict=True):
            exact = w + reference.polar_correction(w)
            assert torch.linalg.matrix_norm(e - exact, 2) <= (1e-9 if kind is SVDCorrection else 0.03) * exact.norm()


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_gradients_are_those_of_a_constant(kind, interval):
    model, x = make(kind(interval=interval), torch.float64)
    refresh_corrections(model, updates=1)
    x.requires_grad_()
    C = model.qkv.correction_matrix()
    ours, naive = model.qkv(x), reference.conditioned_linear(x, model.qkv.weight, model.qkv.bias, C)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    probe, leaves = torch.randn_like(naive), [x, *model.qkv.parameters()]
    for a, b in zip(torch.autograd.grad(ours, leaves, probe), torch.autograd.grad(naive, leaves, probe), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weight", [torch.zeros(36, 12), torch.ones(36, 12), torch.eye(12).repeat(3, 1)])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_degenerate_weights_give_finite_gradients(kind, weight):
    """Equal or zero singular values, where the derivative of an SVD is infinite."""
    model, x = make(kind())
    model.qkv.weight.data.copy_(weight)
    model(x.requires_grad_()).square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (x, *model.parameters()))
    if not weight.any():
        assert torch.equal(model.qkv.effective_weight(), weight)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_stored_correction_changes_only_when_it_is_due(kind):
    model, x = make(kind(interval=3))
    buffer = model.qkv.correction
    for update in range(7):
        before, fresh = buffer.clone(), model.qkv.conditioning.matrix(model.qkv.weight, model.qkv.layout)
        step(model, x, refresh_at=update)
        if update % 3 == 0:
            assert torch.equal(buffer, fresh)
        else:
            assert torch.equal(buffer, before) and not torch.allclose(buffer, fresh)
        before = buffer.clone()
        model.train()(x)
        model.eval()(x)
        assert torch.equal(buffer, before)
        model.train()
    assert model.qkv.correction is buffer, "refreshed in place"


def test_training_without_a_refresh_warns_once():
    model, x = make(SVDCorrection(interval=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(x)
        model.eval()(x)
    with pytest.warns(UserWarning, match="CorrectionRefreshHook"):
        model.train()(x)
    refreshed, _ = make(SVDCorrection(interval=3))
    refresh_corrections(refreshed, updates=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        refreshed(x)


def test_a_stored_correction_survives_folding():
    model, x = make(PolarCorrection(interval=3), torch.float64)
    for update in range(2):  # so that a stored C is not that of the present W
        step(model, x, refresh_at=update)
    before, state = model(x), copy.deepcopy(model.state_dict())
    torch.testing.assert_close(fold(model)(x), before, rtol=1e-12, atol=1e-12)
    for name, tensor in unfold(model).state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-12)


def test_svd_unfolds_what_was_trained_after_folding_by_its_closed_form():
    """W = W' - (s1(W') / 2) U V^T, which needs neither W nor the C of the fold."""
    model, x = make(SVDCorrection(), torch.float64)
    fold(model)
    with torch.no_grad():
        model.qkv.weight *= 3
    expected = model(x)
    torch.testing.assert_close(unfold(model)(x), expected, rtol=1e-12, atol=1e-12)


def test_unfold_refuses_what_is_no_sum_and_leaves_the_model():
    for correction, message in (
        (SVDCorrection(), "condition number is above 2"),
        (PolarCorrection(), "does not follow"),
    ):
        model, _ = make(None)
        model.num_heads, weight = 3, model.qkv.weight.clone()
        with pytest.raises(ValueError, match=message):
            unfold(model, correction)
        assert type(model.qkv) is nn.Linear and torch.equal(model.qkv.weight, weight)
    changed, _ = make(PolarCorrection())
    fold(changed)
    with torch.no_grad():
        changed.qkv.weight *= 3
    with pytest.raises(ValueError, match="changed after folding"):
        unfold(changed)


def test_a_scale_for_each_projection():
    layout = ProjectionLayout(("q", "k", "v"), 2)
    C = IdentityCorrection(dict(q=1, v=10.0), targets=("q", "v")).matrix(torch.zeros(18, 6), layout)
    for scale, block in zip((1, 0, 10), C.chunk(3), strict=True):
        assert torch.equal(block, scale * torch.eye(6))


@pytest.mark.parametrize("scope", ops.SCOPES)
@pytest.mark.parametrize("shape", [(192, 192), (128, 256)])
def test_preserve_norm_keeps_the_frobenius_norm_and_the_condition_number(scope, shape):
    """Weights drawn as ViT's, Swin's and XCiT's are: truncated normal of std 0.02."""
    torch.manual_seed(0)
    (D, E), layout = shape, ProjectionLayout(("q", "k", "v"), 4)
    weight = nn.init.trunc_normal_(torch.empty(3 * D, E, dtype=torch.float64), std=0.02)
    scales = dict(q=0.1, k=10.0, v=1.0)
    kept = IdentityCorrection(scales, scope, preserve_norm=0.02).corrected(weight, layout)
    plain = IdentityCorrection(scales, scope).corrected(weight, layout)
    for w, s, p in zip(*(layout.split(t) for t in (weight, kept, plain)), strict=True):
        assert s.norm().item() == pytest.approx(w.norm().item(), rel=0.01)
        assert p.norm() > 1.04 * w.norm()
    kappas = [ops.condition_number(layout.split(t, scope)) for t in (kept, plain)]
    torch.testing.assert_close(*kappas, rtol=1e-9, atol=0)

"""The conditioned projection against its float64 twin, and the facts of the method that have known answers."""

import itertools

import pytest
import torch

from mmspectral import ops
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.conditioning import reference

# heads, rows per head, input features: square, wide, tall, odd.
SHAPES = [(2, 3, 6), (3, 5, 15), (2, 4, 5), (2, 3, 9)]
CASES = [
    (order, scope, shape)
    for order, scope, shape in itertools.product(ops.ROW_ORDERS, ops.SCOPES, SHAPES)
    if not (order == "[heads][3][d]" and scope == "full" and shape[0] * shape[1] != shape[2])
]


def make(order, scope, shape, dtype=torch.float64, scales=(10.0, 2.0, 0.0)):
    heads, d, columns = shape
    layout = ProjectionLayout(("q", "k", "v"), heads, order)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3 * heads * d, columns, dtype=torch.float64, generator=generator).to(dtype)
    bias = torch.randn(3 * heads * d, dtype=torch.float64, generator=generator).to(dtype)
    x = torch.randn(2, 7, columns, dtype=torch.float64, generator=generator).to(dtype)
    C = reference.identity_matrix(3 * heads * d, columns, list(scales), heads, order, scope)
    return layout, weight, bias, x, C


@pytest.mark.parametrize(("order", "scope", "shape"), CASES)
@pytest.mark.parametrize("scales", [(10.0, 10.0, 10.0), (1.0, 0.0, 2.0)])
def test_correction_has_its_ones_where_the_reference_has_them(order, scope, shape, scales):
    layout, weight, _, x, C = make(order, scope, shape, scales=scales)
    assert torch.equal(ops.add_identity(torch.zeros_like(weight), scales, layout, scope), C)
    torch.testing.assert_close(ops.identity_output(x, weight.shape[0], scales, layout, scope), x @ C.t())


@pytest.mark.parametrize(("order", "scope", "shape"), CASES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_matches_reference_in_values_and_gradients(order, scope, shape, has_bias):
    layout, weight, bias, x, C = make(order, scope, shape)
    leaves = [t.requires_grad_() for t in ((x, weight, bias) if has_bias else (x, weight))]
    bias = bias if has_bias else None
    ours = ops.conditioned_linear(x, weight, bias, (10.0, 2.0, 0.0), layout, scope)
    naive = reference.conditioned_linear(x, weight, bias, C)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(naive)
    for a, b in zip(torch.autograd.grad(ours, leaves, probe), torch.autograd.grad(naive, leaves, probe), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("order", "scope", "shape"), CASES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_norm_preserving_form_matches_reference_in_values_and_gradients(order, scope, shape, has_bias):
    """s (W + C) with an s for each projection; the gradient of W is s times that of s (W + C)."""
    lambdas, std = (10.0, 2.0, 0.0), 0.3
    layout, weight, bias, x, C = make(order, scope, shape, scales=lambdas)
    leaves = [t.requires_grad_() for t in ((x, weight, bias) if has_bias else (x, weight))]
    bias = bias if has_bias else None
    blocks = zip(layout.split(weight), layout.split(C), strict=True)
    effective = torch.stack([reference.norm_preserving_weight(W, C_p, std) for W, C_p in blocks])
    effective = layout.merge(effective)
    naive = reference.conditioned_linear(x, effective, bias, torch.zeros_like(C))
    factors = ops.norm_factors(lambdas, tuple(weight.shape), layout, scope, std)
    assert factors[2] == 1 and factors[0] < factors[1] < 1
    scales = [s * scale for s, scale in zip(factors, lambdas, strict=True)]
    ours = ops.conditioned_linear(x, weight, bias, scales, layout, scope, factors)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ops.add_identity(weight, scales, layout, scope, factors), effective)
    probe = torch.randn_like(naive)
    for a, b in zip(torch.autograd.grad(ours, leaves, probe), torch.autograd.grad(naive, leaves, probe), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factors", [None, (0.5, 2.0, 1.0)])
def test_second_derivatives_and_functorch(factors):
    layout, weight, bias, x, _ = make("[3][heads][d]", "head", (2, 3, 6))

    def f(x, weight, bias):
        return ops.conditioned_linear(x, weight, bias, (1.0, 2.0, 0.0), layout, "head", factors).sin()

    inputs = [t.requires_grad_() for t in (x[:1, :2].clone(), weight, bias)]
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)
    jacobian = torch.func.jacrev(f, argnums=1)(*(t.detach() for t in inputs))
    assert jacobian.shape == (1, 2, 18, 18, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scope", ops.SCOPES)
@pytest.mark.parametrize("by_autocast", [True, False])
def test_half_precision_keeps_the_learned_part(dtype, scope, by_autocast):
    """x W^T of std .39 beside 10 x: the error is that of rounding the result once, not that of rounding W + C."""
    torch.manual_seed(0)
    layout = ProjectionLayout(("q", "k", "v"), 6)
    weight, x = 0.02 * torch.randn(3 * 384, 384), torch.randn(64, 384)
    if not by_autocast:
        weight, x = weight.to(dtype), x.to(dtype)
    C = reference.identity_matrix(3 * 384, 384, [10.0] * 3, 6, "[3][heads][d]", scope)
    exact = reference.conditioned_linear(x, weight, None, C)
    learned = reference.conditioned_linear(x, weight, None, torch.zeros_like(C))
    with torch.autocast("cpu", dtype, enabled=by_autocast):
        ours = ops.conditioned_linear(x, weight, None, [10.0] * 3, layout, scope)
        folded = torch.nn.functional.linear(x, (weight.double() + C).to(dtype if not by_autocast else weight.dtype))
    assert ours.dtype == dtype
    error, folded_error = ((y.double() - exact).norm() / learned.norm() for y in (ours, folded))
    rounding = (exact.to(dtype).double() - exact).norm() / learned.norm()
    assert error <= 1.1 * rounding
    assert error < 0.8 * folded_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_autocast", [True, False])
@pytest.mark.parametrize("order", ops.ROW_ORDERS)
def test_half_precision_of_the_norm_preserving_form(dtype, by_autocast, order):
    """The two terms are scaled and summed in float32: the error is that of rounding x W^T and the result once each."""
    torch.manual_seed(0)
    layout, D = ProjectionLayout(("q", "k", "v"), 6, order), 96
    weight, bias, x = 0.02 * torch.randn(3 * D, D), torch.randn(3 * D), torch.randn(64, D)
    if not by_autocast:
        weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    factors = ops.norm_factors((10.0, 1.0, 0.0), (3 * D, D), layout, "full", 0.02)
    scales = (10 * factors[0], factors[1], 0.0)
    exact = reference.conditioned_linear(
        x, ops.add_identity(weight.double(), scales, layout, "full", factors), bias, torch.zeros(3 * D, D).double()
    )
    with torch.autocast("cpu", dtype, enabled=by_autocast):
        ours = ops.conditioned_linear(x, weight, bias, scales, layout, "full", factors)
    assert ours.dtype == dtype
    rounding = (exact.to(dtype).double() - exact).norm()
    assert (ours.double() - exact).norm() <= 1.5 * rounding


def test_float32_error_is_at_most_twice_that_of_plain_torch():
    torch.manual_seed(0)
    layout = ProjectionLayout(("q", "k", "v"), 3)
    weight, x = torch.randn(3 * 63, 63), torch.randn(5, 63)
    C = reference.identity_matrix(3 * 63, 63, [10.0] * 3, 3, "[3][heads][d]", "full")
    exact = reference.conditioned_linear(x, weight, None, C)
    ours = ops.conditioned_linear(x, weight, None, [10.0] * 3, layout, "full")
    plain = torch.nn.functional.linear(x, (weight.double() + C).float())
    assert (ours - exact).norm() <= 2 * (plain - exact).norm() + 1e-12


def test_weyl_bound_of_theorem_3_8():
    """If lambda exceeds the largest singular value s: kappa(W + lambda I) <= (lambda + s) / (lambda - s)."""
    torch.manual_seed(0)
    layout = ProjectionLayout(("q",), 1)
    for size in (17, 96):
        weight = 0.02 * torch.randn(size, size, dtype=torch.float64)
        s = ops.singular_values(weight)[0]
        for scale in (1.0, 2.0, 10.0):
            kappa = ops.condition_number(ops.add_identity(weight, [scale], layout, "full"))
            assert kappa <= (scale + s) / (scale - s) + 1e-9
            assert kappa < ops.condition_number(weight)


def test_fused_weight_is_three_matrices():
    """users.md E17: the fused path equals three separate projections; the criterion is each one's kappa."""
    torch.manual_seed(0)
    layout, single = ProjectionLayout(("q", "k", "v"), 4), ProjectionLayout(("q",), 4)
    weight, x = 0.02 * torch.randn(3 * 64, 64), torch.randn(5, 64)
    fused = ops.conditioned_linear(x, weight, None, [10.0] * 3, layout, "full")
    apart = [ops.conditioned_linear(x, w, None, [10.0], single, "full") for w in weight.chunk(3)]
    torch.testing.assert_close(fused, torch.cat(apart, -1), rtol=1e-6, atol=1e-5)
    conditioned = layout.split(ops.add_identity(weight, [10.0] * 3, layout, "full"))
    assert (ops.condition_number(conditioned) < 1.2).all()
    assert (ops.condition_number(layout.split(weight)) > 30).all()


def test_condition_number_flags_rank_deficiency():
    assert ops.condition_number(torch.diag(torch.tensor([4.0, 2.0]))) == 2
    assert ops.condition_number(torch.ones(3, 3)) == torch.inf
    assert ops.condition_number(torch.zeros(3, 3)) == torch.inf
    assert ops.condition_number(torch.diag(torch.tensor([4.0, 2.0])).bfloat16()) == 2


@pytest.mark.parametrize("order", ops.ROW_ORDERS)
def test_split_projections_by_role_and_head(order):
    """Rows carry their own (projection, head, i) number, so a wrong split shows."""
    P, h, d = 3, 2, 4
    index = torch.arange(P * h * d).view(P, h, d)  # number of row i of head h of projection P
    rows = index if order == "[3][heads][d]" else index.transpose(0, 1)
    weight = rows.reshape(-1, 1).expand(-1, 8).float()
    layout = ProjectionLayout(("q", "k", "v"), h, order)
    assert torch.equal(layout.split(weight, "head")[..., 0].long(), index)
    assert torch.equal(layout.split(weight)[..., 0].long(), index.flatten(1))
    for scope in ops.SCOPES:
        assert torch.equal(layout.merge(ops.split_projections(weight, layout, scope)), weight)


def test_errors_name_the_cause():
    with pytest.raises(ValueError, match="not a multiple of 12"):
        ops.add_identity(torch.zeros(16, 4), [1.0] * 3, ProjectionLayout(("q", "k", "v"), 4), "full")
    with pytest.raises(ValueError, match="scope must be one of"):
        ops.add_identity(torch.zeros(12, 4), [1.0] * 3, ProjectionLayout(("q", "k", "v"), 1), "rows")
    for call in (ops.add_identity, lambda w, *rest: ops.identity_output(torch.zeros(1, 5), 12, *rest)):
        with pytest.raises(ValueError, match="needs a square projection"):
            call(torch.zeros(12, 5), [1.0] * 3, ProjectionLayout(("q", "k", "v"), 2, "[heads][3][d]"), "full")
    with pytest.raises(ValueError, match="row_order"):
        ProjectionLayout(("q",), 1, "[d][heads]")
    with pytest.raises(ValueError, match="roles"):
        ProjectionLayout(("q", "q"), 1)
    with pytest.raises(ValueError, match="num_heads"):
        ProjectionLayout(("q",), 0)

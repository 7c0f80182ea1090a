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


def linear(x, weight, bias, *settings, dtype=None):
    return torch.nn.functional.linear(x, ops.add_identity(weight, *settings, dtype=dtype), bias)


@pytest.mark.parametrize(("order", "scope", "shape"), CASES)
@pytest.mark.parametrize("std", [None, 0.3])
def test_matches_reference_in_values_and_gradients(order, scope, shape, std):
    """W + C, and s (W + C) with an s for each projection; the gradient of W is s times that of s (W + C)."""
    scales = (10.0, 2.0, 0.0)
    layout, weight, bias, x, C = make(order, scope, shape, scales=scales)
    assert torch.equal(ops.add_identity(torch.zeros_like(weight), scales, layout, scope), C)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    effective, factors = weight + C, None
    if std is not None:
        factors = ops.norm_factors(scales, tuple(weight.shape), layout, scope, std)
        assert factors[2] == 1 and factors[0] < factors[1] < 1
        scales = [s * scale for s, scale in zip(factors, scales, strict=True)]
        blocks = zip(layout.split(weight), layout.split(C), strict=True)
        effective = layout.merge(torch.stack([reference.norm_preserving_weight(W, C_p, std) for W, C_p in blocks]))
    naive = reference.conditioned_linear(x, effective, bias, torch.zeros_like(C))
    ours = linear(x, weight, bias, scales, layout, scope, factors)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(naive)
    for a, b in zip(torch.autograd.grad(ours, leaves, probe), torch.autograd.grad(naive, leaves, probe), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factors", [None, (0.5, 2.0, 1.0)])
def test_derivatives_of_every_kind(factors):
    layout, weight, bias, x, _ = make("[3][heads][d]", "head", (2, 1, 2))

    def f(x, weight, bias):
        return linear(x, weight, bias, (1.0, 2.0, 0.0), layout, "head", factors).sin()

    inputs = [t.requires_grad_() for t in (x[:1, :2].clone(), weight, bias)]
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs)
    jacobian = torch.func.jacrev(f, argnums=1)(*(t.detach() for t in inputs))
    assert jacobian.shape == (1, 2, 6, 6, 2)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(f, argnums=1)(*(t.detach() for t in inputs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("factors", [None, (0.2, 0.9, 1.0)])
@pytest.mark.parametrize("order", ops.ROW_ORDERS)
def test_error_is_at_most_twice_that_of_a_linear_layer_with_the_same_weight(dtype, stored, factors, order):
    """The sum is formed in float32 and rounded once, also for a weight that is stored in low precision."""
    torch.manual_seed(0)
    layout, D, scales = ProjectionLayout(("q", "k", "v"), 6, order), 192, (10.0, 1.0, 0.0)
    weight, x = 0.02 * torch.randn(3 * D, D), torch.randn(64, D).to(dtype)
    weight = weight.to(dtype) if stored else weight
    exact_weight = ops.add_identity(weight.double(), scales, layout, "full", factors)
    exact = x.double() @ exact_weight.t()
    ours = linear(x, weight, None, scales, layout, "full", factors, dtype=dtype)
    plain = torch.nn.functional.linear(x, exact_weight.to(dtype))
    assert ours.dtype == dtype
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()
    assert torch.equal(ours, plain) or dtype == torch.float32 or factors


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


def test_condition_number_flags_rank_deficiency():
    assert ops.condition_number(torch.diag(torch.tensor([4.0, 2.0]))) == 2
    assert ops.condition_number(torch.ones(3, 3)) == torch.inf
    assert ops.condition_number(torch.zeros(3, 3)) == torch.inf
    assert ops.condition_number(torch.diag(torch.tensor([4.0, 2.0])).bfloat16()) == 2


@pytest.mark.parametrize("order", ops.ROW_ORDERS)
def test_split_by_role_and_head(order):
    """Rows carry their own (projection, head, i) number, so a wrong split shows."""
    P, h, d = 3, 2, 4
    index = torch.arange(P * h * d).view(P, h, d)  # number of row i of head h of projection P
    rows = index if order == "[3][heads][d]" else index.transpose(0, 1)
    weight = rows.reshape(-1, 1).expand(-1, 8).float()
    layout = ProjectionLayout(("q", "k", "v"), h, order)
    assert torch.equal(layout.split(weight, "head")[..., 0].long(), index)
    assert torch.equal(layout.split(weight)[..., 0].long(), index.flatten(1))
    for scope in ops.SCOPES:
        assert torch.equal(layout.merge(layout.split(weight, scope)), weight)
    outputs = weight.t()  # [8, P * D]
    assert torch.equal(layout.join_heads(layout.heads(outputs, -1), -3), outputs)
    factors = torch.tensor([1.0, 2.0, 3.0])
    scaled = layout.split(layout.scale_rows(weight, factors.tolist()), "head")
    assert torch.equal(scaled, layout.split(weight, "head") * factors[:, None, None, None])
    assert torch.equal(layout.row_factors(factors, len(weight))[:, None] * weight, layout.merge(scaled))


def test_errors_name_the_cause():
    with pytest.raises(ValueError, match="not a multiple of 12"):
        ops.add_identity(torch.zeros(16, 4), [1.0] * 3, ProjectionLayout(("q", "k", "v"), 4), "full")
    with pytest.raises(ValueError, match="scope must be one of"):
        ops.add_identity(torch.zeros(12, 4), [1.0] * 3, ProjectionLayout(("q", "k", "v"), 1), "rows")
    with pytest.raises(ValueError, match="needs a square projection"):
        ops.add_identity(torch.zeros(12, 5), [1.0] * 3, ProjectionLayout(("q", "k", "v"), 2, "[heads][3][d]"), "full")
    with pytest.raises(ValueError, match="row_order"):
        ProjectionLayout(("q",), 1, "[d][heads]")
    with pytest.raises(ValueError, match="roles"):
        ProjectionLayout(("q", "q"), 1)
    with pytest.raises(ValueError, match="num_heads"):
        ProjectionLayout(("q",), 0)

"""Theorems 3.3 and 3.4: closed forms against autograd, and what the bound is worth."""

import pytest
import torch

from mmspectral.ops.conditioning.jacobian import attention, attention_jacobian, effective_condition, jacobian_bound

# N tokens, D features, d dimensions of q and k, e of v: one token, fewer and more tokens than features, odd sizes.
SIZES = [(5, 7, 3, 3), (9, 4, 3, 5), (1, 3, 2, 4), (6, 6, 6, 6), (4, 13, 5, 2)]
sizes = pytest.mark.parametrize("size", SIZES)


def draw(N, D, d, e, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((N, D), (D, d), (D, d), (D, e))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def vec(matrix):
    """Column-major vec of the last two dimensions."""
    return matrix.mT.flatten(-2)


def autograd_jacobian(X, weights, scale):
    def flat(*weights):
        return vec(attention(X, *weights, scale))

    parts = torch.autograd.functional.jacobian(flat, tuple(weights))
    return [vec(part) for part in parts]


@sizes
@pytest.mark.parametrize("scaled", [False, True])
def test_closed_forms_equal_autograd(size, scaled):
    X, *weights = draw(*size)
    scale = size[2] ** -0.5 if scaled else 1.0
    ours = attention_jacobian(X, *weights, scale)
    for mine, theirs in zip(ours, autograd_jacobian(X, weights, scale), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_nearly_one_hot_attention_keeps_its_digits():
    """With two tokens and logits g apart the derivative is s1 s2 (v1 - v2) (k1 - k2)^T: about exp(-g), not zero."""
    X = torch.eye(2, dtype=torch.float64)
    key = torch.tensor([[45.0], [0.0]], dtype=torch.float64)
    query, value = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[3.0], [1.0]], dtype=torch.float64)
    by_query, _, _ = attention_jacobian(X, query, key, value)
    weights = torch.sigmoid(torch.tensor([45.0, -45.0], dtype=torch.float64)).prod()
    torch.testing.assert_close(by_query, weights * 2 * 45 * X, rtol=1e-12, atol=0)


def test_effective_condition_counts_what_is_not_zero():
    found = effective_condition(torch.diag(torch.tensor([8.0, 2.0, 0.0])))
    assert (found.kappa, found.rank, found.full_rank, found.deficient) == (4.0, 2, 3, True)
    assert not effective_condition(torch.eye(3)[:2]).deficient
    assert effective_condition(torch.diag(torch.tensor([1.0, 1e-3])), rtol=1e-2).rank == 1
    assert effective_condition(torch.zeros(2, 3)).kappa == float("inf")


@sizes
def test_factors_of_the_bound(size):
    X, Wq, Wk, Wv = draw(*size)
    N, D = X.shape
    bound = jacobian_bound(X, Wq, Wk, Wv, 0.3)
    S = (0.3 * X @ Wq @ Wk.T @ X.T).softmax(-1)
    Lambda = torch.block_diag(*(torch.diag(row) - torch.outer(row, row) for row in S))
    assert bound.softmax_derivative.rank == torch.linalg.matrix_rank(Lambda) == N * (N - 1)
    assert "softmax_derivative" in bound.deficient_factors
    if N > 1:
        sigma = torch.linalg.svdvals(Lambda)[: N * (N - 1)]
        assert bound.softmax_derivative.kappa == pytest.approx((sigma[0] / sigma[-1]).item(), rel=1e-6)
        kappa = [torch.linalg.cond(matrix).item() for matrix in (X, Wv, Wq, Wk, S)]
        expected = kappa[0] ** 3 * bound.softmax_derivative.kappa * kappa[1] * (kappa[2] + kappa[3])
        if D >= N:
            assert bound.effective == pytest.approx(expected + kappa[0] * kappa[4], rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_ill_conditioned_tokens_make_the_bound_loose(seed):
    """Through kappa(X)^3: tokens that share a large part of their content are ill-conditioned."""
    X, *weights = draw(4, 16, 5, 3, seed)
    weights = [0.2 * weight for weight in weights]
    excess = []
    for shared in (0.0, 10.0):
        kappa = effective_condition(torch.cat(attention_jacobian(X + shared, *weights, 0.5), dim=1)).kappa
        excess.append(jacobian_bound(X + shared, *weights, 0.5).effective / kappa)
    assert excess[0] > 1 and excess[1] > 10 * excess[0]


def test_scaling_the_values_passes_the_finite_number_that_replaces_the_bound():
    """No theorem is left once kappa(Lambda) is taken over the non-zero singular values (docstring of the bound)."""
    X, Wq, Wk, Wv = draw(3, 16, 5, 4)
    found = {}
    for factor in (1.0, 1e8):
        weights = (0.2 * Wq, 0.2 * Wk, 0.2 * factor * Wv)
        J = torch.cat(attention_jacobian(X, *weights, 0.5), dim=1)
        assert not effective_condition(J).deficient
        found[factor] = effective_condition(J).kappa, jacobian_bound(X, *weights, 0.5).effective
    assert found[1e8][1] == pytest.approx(found[1.0][1], rel=1e-6)
    assert found[1.0][0] < found[1.0][1]
    assert found[1e8][0] > 100 * found[1e8][1]

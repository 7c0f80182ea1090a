"""Draws are Haar and chi, and every estimator that claims to be unbiased is."""

import math

import pytest
import torch

from mmspectral.ops.random_features import (
    Proposal,
    draw_projection,
    fold_features,
    kernel_logits,
    sharp_proposal,
    theorem_3_2_proposal,
)

DRAWS = 20_000


def blocks(dim, count, **kwargs):
    """Draws of ``count`` orthogonal blocks [count, dim, dim]; blocks of one draw are independent."""
    return draw_projection(count * dim, dim, seed=7, dtype=torch.float64, **kwargs).view(count, dim, dim)


def test_the_draw_is_a_function_of_seed_layer_and_counter():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw_projection(10, 4, seed=3, layer=2, counter=1)
    torch.testing.assert_close(draw_projection(10, 4, seed=3, layer=2, counter=1), first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before), "the global generator must be left alone"
    others = [dict(seed=4, layer=2, counter=1), dict(seed=3, layer=1, counter=2), dict(seed=3, layer=2, counter=2)]
    assert all(not torch.equal(draw_projection(10, 4, **other), first) for other in others)
    assert first.dtype == torch.float32 and first.device.type == "cpu"
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least one"):
            draw_projection(*shape, seed=0)


@pytest.mark.parametrize(("m", "dim"), [(5, 5), (13, 5), (3, 5)])
def test_blocks_are_orthogonal(m, dim):
    w = draw_projection(m, dim, seed=0, dtype=torch.float64)
    for start in range(0, m, dim):
        gram = w[start : start + dim] @ w[start : start + dim].t()
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-12)


def test_rows_of_blocks_are_uniform():
    """Without the sign fix the quadrants of 2-D rows are far from even."""
    rows = blocks(2, DRAWS)
    for row in rows.unbind(1):
        quadrant = (row[:, 0] > 0).int() * 2 + (row[:, 1] > 0).int()
        counts = torch.bincount(quadrant, minlength=4).double()
        assert (counts - DRAWS / 4).square().sum() / (DRAWS / 4) < 16.3  # chi^2 with 3 degrees, p = .001
        angle = torch.atan2(row[:, 1], row[:, 0])
        for frequency in (1, 2, 4, 8):  # mean resultant length of uniform angles: Rayleigh, p = .001
            resultant = torch.exp(1j * frequency * angle).mean().abs()
            assert resultant < math.sqrt(6.9 / DRAWS), frequency


@pytest.mark.parametrize("orthogonal", [True, False])
def test_rows_are_standard_normal(orthogonal):
    rows = draw_projection(3 * DRAWS, 3, seed=5, orthogonal=orthogonal, dtype=torch.float64)
    z = math.sqrt(len(rows))
    assert rows.mean(0).abs().max() < 4.5 / z
    assert (rows.t() @ rows / len(rows) - torch.eye(3)).abs().max() < 4.5 * math.sqrt(2) / z
    squares = rows.square().sum(-1)  # chi^2 with 3 degrees: mean 3, variance 6
    assert abs(squares.mean() - 3) < 4.5 * math.sqrt(6) / z
    assert squares.var().item() == pytest.approx(6, rel=0.05)


def estimates(q, k, M, shift=None, proposal=None, orthogonal=True):
    """One estimate of exp(q^T Sigma (k - c)) per block of a draw [DRAWS], through the folded form."""
    r = M.shape[0]
    w = blocks(r, DRAWS) if orthogonal else draw_projection(r * DRAWS, r, 7, orthogonal=False, dtype=torch.float64)
    heads = w.view(DRAWS, r, r)
    features = fold_features(heads, M, len(q), scale=1.0, shift=shift, proposal=proposal, orthogonal=orthogonal)
    q, k = (x.expand(1, DRAWS, 1, -1) for x in (q, k))
    return kernel_logits(q, k, features).exp().flatten()


def setting():
    generator = torch.Generator().manual_seed(0)
    q, k, c = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(3))
    M = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    M = M / (M @ (q + k - c)).norm().clamp(min=1)  # heavier tails beyond make z-scores meaningless
    return q, k, c, M / (M @ (q + k)).norm().clamp(min=1)


def second_moment(M, *points):
    return sum(torch.outer(M @ x, M @ x) for x in points) / len(points) + 0.05 * torch.eye(len(M), dtype=M.dtype)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize(
    "reducer", ["plain", "shift", "sharp", "sharp + shift", "theorem 3.2", "rank 2", "temperature"]
)
def test_estimates_are_unbiased(reducer, orthogonal):
    q, k, c, M = setting()
    if reducer == "rank 2":
        M = M[:2]
    if reducer == "temperature":
        M = 0.5 * torch.eye(3, dtype=M.dtype) / (q + k).norm().clamp(min=1)
    shift = c if "shift" in reducer else None
    z = q + k - c if "shift" in reducer else q + k
    assert (M @ z).norm() <= 1 + 1e-12
    proposal = None
    if "sharp" in reducer:
        proposal = sharp_proposal(second_moment(M, z))
    if reducer == "theorem 3.2":
        proposal = theorem_3_2_proposal(second_moment(M, q, k) / 8)
    values = estimates(q, k, M, shift, proposal, orthogonal)
    target = torch.exp((M @ q) @ (M @ (k if shift is None else k - c)))
    assert abs(values.mean() - target) / (values.std() / math.sqrt(DRAWS)) < 4


def test_sharp_minimises_the_mean_log_second_moment():
    """Along one direction: E[(phi phi)^2] in closed form, minimised over sigma by search."""
    for lambda_ in (0.0, 0.05, 0.3, 1.0, 5.0):
        sigma = sharp_proposal(torch.tensor([[lambda_]], dtype=torch.float64)).variance.item()

        s = torch.arange(0.6, 20, 1e-4, dtype=torch.float64)
        best = s[(s.log() - (2 * s - 1).log() / 2 + 2 * s * lambda_ / (2 * s - 1)).argmin()].item()
        assert sigma == pytest.approx(best, abs=2e-4)
        assert (1 - sigma) / 4 == pytest.approx((1 - (2 * sigma - 1)) / 8), "a of the paper"


def test_theorem_3_2_raises_where_it_does_not_hold():
    proposal = theorem_3_2_proposal(torch.diag(torch.tensor([0.1, 0.3, 0.0])))
    expected = torch.tensor([1.0, 1.2 / 0.8, 1.6 / 0.4], dtype=torch.float64)
    torch.testing.assert_close(proposal.variance, expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="eigenvalues of Lambda below 1/2, the largest is 0.5"):
        theorem_3_2_proposal(torch.diag(torch.tensor([0.1, 0.5])))


def test_theorem_3_2_is_optimal_for_gaussian_data():
    """1-d: log E_{q,k}[Var] over sigma is least at (1 + 2 lambda) / (1 - 2 lambda)."""
    lambda_, grid = 0.2, torch.linspace(-25, 25, 20_001, dtype=torch.float64)
    # E_{q, k} of exp(2 omega (q + k) - q^2 - k^2), the square of E over one of them
    per_token = torch.exp(2 * lambda_ * grid.square() / (1 + 2 * lambda_)) / math.sqrt(1 + 2 * lambda_)

    def moment(sigma):
        log_density = -grid.square() / (2 * sigma) - math.log(2 * math.pi * sigma) / 2
        log_normal = -grid.square() / 2 - math.log(2 * math.pi) / 2
        return torch.trapezoid(torch.exp(2 * log_normal - log_density) * per_token.square(), grid).item()

    best = min((1.2 + 0.01 * i for i in range(300)), key=moment)
    sigma = theorem_3_2_proposal(torch.tensor([[lambda_]], dtype=torch.float64)).variance.item()
    assert sigma == pytest.approx(best, abs=0.011)


def test_the_norm_is_read_off_the_features_only_where_that_is_exact():
    w, M = draw_projection(8, 4, seed=0), torch.eye(4)
    assert fold_features(w, M, 4, orthogonal=True).rows.shape[1] == 8
    separate = [
        fold_features(w, M, 4),
        fold_features(w[:3], M, 4, orthogonal=True),
        fold_features(w.clone().requires_grad_(), M, 4, orthogonal=True),
        fold_features(w.bfloat16(), M, 4, orthogonal=True),
        fold_features(w, M, 4, proposal=Proposal(torch.eye(4), torch.full((4,), 2.0)), orthogonal=True),
    ]
    assert [f.rows.shape[1] - f.num_features for f in separate] == [4] * 5


@pytest.mark.parametrize(
    ("w", "M", "shift", "message"),
    [
        ((8, 4), (3, 5), None, "do not fit"),
        ((8, 4), (4, 6), None, "do not fit"),
        ((8,), (4, 5), None, "do not fit"),
        ((2, 8, 4), (3, 4, 5), None, "different numbers of heads"),
        ((8, 4), (2, 4, 5), (3, 5), "different numbers of heads"),
    ],
)
def test_shapes_that_do_not_fit_are_named(w, M, shift, message):
    with pytest.raises(ValueError, match=message):
        fold_features(torch.ones(w), torch.ones(M), 5, shift=None if shift is None else torch.ones(shift))

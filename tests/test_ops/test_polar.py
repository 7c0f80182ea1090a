"""sigma_max U V^T with and without an SVD, against its float64 twin and against what is known of it."""

import math

import pytest
import torch

from mmspectral import ops
from mmspectral.ops.conditioning import reference


def with_spectrum(sigma, rows, columns, seed=0, dtype=torch.float32):
    """A matrix with given singular values and random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    n = len(sigma)
    U, V = (
        torch.linalg.qr(torch.randn(size, n, dtype=torch.float64, generator=generator)).Q for size in (rows, columns)
    )
    return ((U * torch.as_tensor(sigma, dtype=torch.float64)) @ V.t()).to(dtype)


def spectrum(kappa, n):
    return torch.logspace(0, -math.log10(kappa), n, dtype=torch.float64)


def kappa_corrected(W, C):
    return ops.condition_number(W.double() + C.double()).item()


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (7, 4), (4, 9), (63, 63)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_forms_match_the_reference(rows, columns, dtype):
    torch.manual_seed(0)
    W = torch.randn(2, 3, rows, columns, dtype=torch.float64).to(dtype)
    exact = torch.stack([reference.polar_correction(w) for w in W.flatten(0, 1)]).view(2, 3, rows, columns)
    svd, polar = ops.svd_correction(W), ops.polar_correction(W, 1e4)
    assert svd.dtype == polar.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4  # the reference squares the condition number
    torch.testing.assert_close(svd.double(), exact, rtol=tolerance, atol=tolerance)
    # polar: error .017 in U V^T and n^(1/512) in sigma_max, both as spectral norms
    error = torch.linalg.matrix_norm(polar.double() - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    assert (error < 0.017 + 2 * (min(rows, columns) ** (1 / 512) - 1)).all()


@pytest.mark.parametrize("kappa", [1.5, 10.0, 1e3, 1e6])
def test_svd_gives_the_condition_number_of_theorem_3_5(kappa):
    """kappa(W + C) = 2 s1 / (s1 + smin)."""
    W = with_spectrum(spectrum(kappa, 12), 12, 20, dtype=torch.float64)
    assert kappa_corrected(W, ops.svd_correction(W)) == pytest.approx(2 / (1 + 1 / kappa), rel=1e-9)


@pytest.mark.parametrize("n", [8, 63, 384])
@pytest.mark.parametrize("kappa", [1e1, 1e3, 1e6])
def test_polar_keeps_its_promise_up_to_kappa(n, kappa):
    spectra = {
        "logarithmic": spectrum(kappa, n),
        "one large": torch.tensor([1.0] + [1 / kappa] * (n - 1)),
        "one small": torch.tensor([1.0] * (n - 1) + [1 / kappa]),
        "linear": torch.linspace(1, 1 / kappa, n),
    }
    for name, sigma in spectra.items():
        W = 0.02 * with_spectrum(sigma, n, n)
        assert kappa_corrected(W, ops.polar_correction(W, kappa)) <= 2.05 + 1e-3, name


def test_beyond_kappa_polar_degrades_and_zeros_stay_zero_where_svd_repairs_them():
    sigma = torch.ones(16)
    worst = []
    for smallest in (1e-3, 1e-4, 1e-5, 1e-6):
        sigma[-1] = smallest
        W = with_spectrum(sigma, 16, 16, dtype=torch.float64)
        worst.append(kappa_corrected(W, ops.polar_correction(W, 1e3)))
    assert worst[0] <= 2.05 < worst[2] < worst[3], worst
    sigma[-2:] = 0
    W = with_spectrum(sigma, 16, 16, dtype=torch.float64)
    assert kappa_corrected(W, ops.polar_correction(W, 1e3)) > 1e10
    assert kappa_corrected(W, ops.svd_correction(W)) == pytest.approx(2, rel=1e-9)


@pytest.mark.parametrize("form", [ops.svd_correction, lambda W: ops.polar_correction(W, 1e3)])
def test_zero_extreme_sizes_and_constancy(form):
    assert torch.equal(form(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))
    W = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    for scale in (1e-30, 1e30):
        torch.testing.assert_close(form(W * scale) / scale, form(W), rtol=1e-3, atol=1e-4)
    for matrix in (W, torch.zeros(6, 6), torch.eye(6), torch.ones(6, 6)):
        leaf = matrix.clone().requires_grad_()
        assert not form(leaf).requires_grad
        (leaf + form(leaf)).sum().backward()
        assert torch.equal(leaf.grad, torch.ones(6, 6))


@pytest.mark.parametrize("form", [ops.svd_correction, lambda W: ops.polar_correction(W, 1e3)])
def test_autocast_does_not_reach_it(form):
    W = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    expected = form(W)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(form(W), expected)
    batch = torch.stack([W, 2 * W])
    torch.testing.assert_close(torch.func.vmap(form)(batch), form(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 3), (5, 64), (64, 5), (200, 200)])
def test_bound_is_never_below_sigma_max(rows, columns):
    """Random, rank one, orthogonal: from the widest gap below sigma_max to none at all."""
    n = min(rows, columns)
    generator = torch.Generator().manual_seed(0)
    cases = [torch.randn(rows, columns, generator=generator) for _ in range(20)]
    cases += [with_spectrum([3.0] + [0.0] * (n - 1), rows, columns), with_spectrum([3.0] * n, rows, columns)]
    for W in cases:
        sigma_max = ops.singular_values(W.double())[0].item()
        for squarings in (0, 3, 8):
            bound = ops.spectral_norm_bound(W, squarings).item()
            assert sigma_max <= bound <= sigma_max * n ** (0.5 / 2**squarings) * 1.001


@pytest.mark.parametrize("interval", [(1e-6, 1.01), (1e-3, 1.0), (0.2, 1.7), (0.98, 1.03)])
def test_quintic_is_the_best_one(interval):
    """Its error alternates at four points, which by Chebyshev's theorem no odd quintic can improve on."""
    (a, b, c), error = ops.optimal_quintic(*interval)
    x = torch.logspace(math.log10(interval[0]), math.log10(interval[1]), 200001, dtype=torch.float64)
    x[0], x[-1] = interval
    residual = 1 - (a * x + b * x**3 + c * x**5)
    assert residual.abs().max().item() == pytest.approx(error, rel=1e-6, abs=1e-12)
    extremes = residual[residual.abs() > error * (1 - 1e-5)].sign()
    assert extremes[torch.cat([torch.tensor([True]), extremes.diff() != 0])].tolist() == [1, -1, 1, -1]

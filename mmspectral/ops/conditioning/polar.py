"""The correction sigma_max U V^T of a matrix W = U S V^T (arXiv 2603.07162, Theorem 3.5), with and without an SVD.

W + sigma_max U V^T has the singular values sigma_i + sigma_max, so its condition
number 2 sigma_max / (sigma_max + sigma_min) is at most 2. U V^T is the polar
factor of W. Without an SVD it is found by Polar Express (arXiv 2505.16932): odd
polynomials of degree 5 of W, each the best one for where the singular values
lie by then, so that only matrix products are needed.

All of it is constant for autograd and runs in float32 (float64 for float64)
whatever autocast says. TF32 products (torch's default is not to use them) are
too coarse for what :func:`polar_correction` promises.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from mmspectral.ops.precision import at_least_float32, without_autocast

SAFETY = 1.01  # each polynomial is made for singular values up to this much above what exact arithmetic gives
MAX_KAPPA = 2.05  # of W + C, for kappa(W) up to the one that is promised
SQUARINGS = 8


def svd_correction(matrix: Tensor) -> Tensor:
    """Return sigma_max U V^T of W [..., rows, columns] by an SVD.

    Directions of singular value zero are completed to orthonormal ones, so the
    sum with W has full rank, unless W = 0, whose correction is 0.

    Returns:
        C, of the shape of W, in float32 or better, without gradient.
    """
    matrix = at_least_float32(matrix.detach())
    with without_autocast(matrix.device):
        U, sigma, Vh = torch.linalg.svd(matrix, full_matrices=False)
        return sigma[..., :1, None] * (U @ Vh)


def polar_correction(matrix: Tensor, kappa: float) -> Tensor:
    """Return sigma_max U V^T by matrix products alone.

    sigma_max is replaced by an upper bound, at most n^(1/512) too large for n
    singular values, and U V^T is approximated, so that the condition number of
    W + C is at most 2.05 if that of W is at most ``kappa``. Beyond, small
    singular values are raised too little: kappa(W + C) grows with kappa(W) and
    a singular value of zero stays zero.

    Args:
        matrix: W [..., rows, columns].
        kappa: The condition number up to which the promise holds.

    Returns:
        C, of the shape of W, in float32 or better, without gradient; 0 for W = 0.
    """
    W = at_least_float32(matrix.detach())
    tall = W.shape[-2] > W.shape[-1]
    W = W.mT if tall else W  # products of the smaller side
    with without_autocast(W.device):
        X, norm = _normalised(W)
        bound = norm * _relative_spectral_norm(X, SQUARINGS)
        for a, b, c in polar_schedule(kappa, W.shape[-2]):
            A = X @ X.mT
            X = a * X + (b * A + c * (A @ A)) @ X
        C = bound * X
    return C.mT.contiguous() if tall else C


def spectral_norm_bound(matrix: Tensor, squarings: int = SQUARINGS) -> Tensor:
    """Return an upper bound of sigma_max: the Schatten norm of order 2^(squarings + 1).

    A power iteration would be cheaper, but it can only underestimate, and by
    any amount if its start is unlucky.

    Args:
        matrix: W [..., rows, columns] with n = min(rows, columns).
        squarings: How often W W^T is squared; with m of them the bound is at
            most n^(1 / 2^(m + 1)) times sigma_max.

    Returns:
        A tensor [...] in float32 or better.
    """
    W = at_least_float32(matrix.detach())
    W = W.mT if W.shape[-2] > W.shape[-1] else W
    with without_autocast(W.device):
        X, norm = _normalised(W)
        return (norm * _relative_spectral_norm(X, squarings))[..., 0, 0]


def optimal_quintic(lower: float, upper: float) -> tuple[tuple[float, float, float], float]:
    """Return the odd p(x) = a x + b x^3 + c x^5 that is closest to 1 on [lower, upper], and its largest error.

    The best p is the one whose error has one size and alternating sign at four
    points: the ends and the two places q < r between where p' = 0 (Chebyshev).
    Remez' exchange finds them: solve for (a, b, c, error) at trial points, move
    q and r to the zeros of p', repeat.

    Raises:
        ValueError: The interval is empty or reaches 0.
    """
    if not 0 < lower < upper:
        raise ValueError(f"the interval must satisfy 0 < lower < upper, got [{lower}, {upper}].")
    q, r = lower + (upper - lower) / 4, lower + (upper - lower) * 3 / 4
    error, signs = math.inf, (1.0, -1.0, 1.0, -1.0)
    for _ in range(100):
        points = (lower, q, r, upper)
        rows = [[x, x**3, x**5, sign] for x, sign in zip(points, signs, strict=True)]
        system = torch.tensor(rows, dtype=torch.float64, device="cpu")
        ones = torch.ones(4, dtype=torch.float64, device="cpu")
        a, b, c, new_error = torch.linalg.solve(system, ones).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        q, r = (math.sqrt((-3 * b - sign * root) / (10 * c)) for sign in (1, -1))
        if abs(new_error - error) <= 1e-13:
            break
        error = new_error
    return (a, b, c), new_error


@torch.compiler.assume_constant_result
def polar_schedule(kappa: float, n: int) -> tuple[tuple[float, float, float], ...]:
    """Return the polynomials that take W / |W|_F to its polar factor, for n singular values.

    They lie between 1 / (kappa sqrt(n)) and 1. A polynomial of error E puts them
    between 1 - E and 1 + E, from where the next one goes on; the last is the
    first after which kappa(W + C) <= (2 + E) / (1 - E) <= 2.05.
    """
    return _polar_schedule(kappa, n)


@lru_cache(maxsize=256)
def _polar_schedule(kappa: float, n: int) -> tuple[tuple[float, float, float], ...]:
    lower, upper = 1 / (kappa * math.sqrt(n)), 1.0
    schedule = []
    while not schedule or (1 + upper) / lower > MAX_KAPPA:
        coefficients, error = optimal_quintic(lower, SAFETY * upper)
        schedule.append(coefficients)
        lower, upper = 1 - error, 1 + error
    return tuple(schedule)


def _normalised(W: Tensor) -> tuple[Tensor, Tensor]:
    """Return W / |W|_F and |W|_F [..., 1, 1]; both 0 for W = 0. Entries are scaled first: squares may underflow."""
    largest = W.abs().amax((-2, -1), keepdim=True)
    scaled = W / torch.where(largest > 0, largest, torch.ones_like(largest))
    norm = scaled.square().sum((-2, -1), keepdim=True).sqrt()
    return scaled / torch.where(norm > 0, norm, torch.ones_like(norm)), largest * norm


def _relative_spectral_norm(X: Tensor, squarings: int) -> Tensor:
    """Bound sigma_max [..., 1, 1] of X [..., n, columns] with |X|_F = 1 by tr((X X^T)^(2^m))^(1 / 2^(m + 1))."""
    G = X @ X.mT
    tiny = torch.finfo(X.dtype).tiny
    log_trace = torch.zeros_like(X[..., :1, :1])
    for step in range(squarings + 1):
        if step:
            G = G @ G
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(tiny)
        G = G / trace
        log_trace = 2 * log_trace + trace.log() if step else trace.log()
    rounding = 1 + 4 * X.shape[-2] * torch.finfo(X.dtype).eps  # sums of n rounded terms: stay above
    return (log_trace / 2 ** (squarings + 1)).exp() * rounding

"""Spectral conditioning of a projection by a scaled identity (arXiv 2603.07162, Theorem 3.8).

A projection x W^T becomes x (W + C)^T with C = lambda * I_k on every conditioned
projection, where I_k has ones on the main diagonal, also of a matrix that is not
square; the norm-preserving form is s (W + C) with a constant s. Scope ``full``
puts one identity on the [D, E] matrix of a projection, scope ``head`` one on each
[d, E] block of a head. A fused weight is never taken as one matrix: each of its
projections is conditioned by itself.

Shape legend: P projections, h heads, d rows per head, D = h * d, E input features.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmspectral.ops.conditioning.layout import ProjectionLayout, check_scope, require_whole
from mmspectral.ops.precision import at_least_float32


def add_identity(
    weight: Tensor,
    scales: Sequence[float],
    layout: ProjectionLayout,
    scope: str,
    factors: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return W + C, or f W + C with a factor f for each projection.

    The sum is formed in float32 or better and rounded once.

    Args:
        weight: W [P * D, E].
        scales: lambda of each projection, in the order of ``layout.roles``; 0
            leaves a projection as it is.
        layout: Rows of the weight.
        scope: ``"full"`` or ``"head"``.
        factors: f of each projection; None is 1. The norm-preserving form
            s (W + lambda I) has f = s and s lambda among ``scales``.
        dtype: Of the result; that of ``weight`` by default.

    Returns:
        A new tensor [P * D, E]. The gradient with respect to W is f times that
        with respect to the result, since C is a constant.
    """
    require_whole(weight)
    scaled = weight if factors is None else layout.scale_rows(at_least_float32(weight), factors)
    # One pass over the weight: only the diagonal is touched again.
    conditioned = scaled.to(dtype or weight.dtype, copy=True, memory_format=torch.contiguous_format)
    with torch.no_grad():  # C is a constant, so the gradient of the copy is that of the sum
        summed = at_least_float32(layout.diagonal(scaled, scope))
        if len(set(scales)) == 1:
            summed = summed + scales[0]
        else:
            summed = torch.stack([row + scale for row, scale in zip(summed.unbind(0), scales, strict=True)])
        layout.diagonal(conditioned, scope).copy_(summed)
    return conditioned


def norm_factors(
    scales: Sequence[float], shape: tuple[int, int], layout: ProjectionLayout, scope: str, std: float
) -> tuple[float, ...]:
    """Return the s of each projection with which s (W + lambda I) has the Frobenius norm of W, in expectation."""
    check_scope(scope)
    (rows, E), h = shape, layout.num_heads
    d = layout.rows_per_head(rows)
    ones = h * min(d, E) if scope == "head" else min(h * d, E)
    learned = h * d * E * std**2  # expected |W|_F^2; W and C are orthogonal in expectation
    return tuple(math.sqrt(learned / (learned + ones * scale**2)) for scale in scales)

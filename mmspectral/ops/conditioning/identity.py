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
import torch.nn.functional as F
from torch import Tensor

from mmspectral.ops.conditioning.layout import ProjectionLayout
from mmspectral.ops.precision import product_dtype

SCOPES = ("full", "head")


def identity_diagonal(matrix: Tensor, layout: ProjectionLayout, scope: str) -> Tensor:
    """View the entries of a projection weight on which the identity has its ones.

    Args:
        matrix: Weight [P * D, E].
        layout: Its rows.
        scope: ``"full"`` or ``"head"``.

    Returns:
        A view of ``matrix`` with the projections first: [P, n] for scope
        ``full`` or [P, h, n] for scope ``head`` and for interleaved rows.

    Raises:
        ValueError: Unknown scope; rows that do not fit the layout; or scope
            ``full`` on interleaved rows of a projection that is not square.
    """
    _check_scope(scope)
    (rows, E), P, h = matrix.shape, len(layout.roles), layout.num_heads
    d = layout.rows_per_head(rows)
    interleaved = layout.row_order == "[heads][3][d]"
    if scope == "head":
        blocks = matrix.view(h, P, d, E).transpose(0, 1) if interleaved else matrix.view(P, h, d, E)
        return blocks.diagonal(dim1=2, dim2=3)  # [P, h, min(d, E)]
    if not interleaved:
        return matrix.view(P, h * d, E).diagonal(dim1=1, dim2=2)  # [P, min(D, E)]
    if h * d != E:
        raise ValueError(f"scope 'full' on rows {layout.row_order} needs a square projection, got {h * d} x {E}.")
    blocks = matrix.view(h, P, d, h, d).diagonal(dim1=0, dim2=3)  # [P, d, d, h]
    return blocks.diagonal(dim1=1, dim2=2)  # [P, h, d]


def add_identity(
    weight: Tensor,
    scales: Sequence[float],
    layout: ProjectionLayout,
    scope: str,
    factors: Sequence[float] | None = None,
) -> Tensor:
    """Return W + C, or f W + C with a factor f for each projection.

    Args:
        weight: W [P * D, E].
        scales: lambda of each projection, in the order of ``layout.roles``; 0
            leaves a projection as it is.
        layout: Rows of the weight.
        scope: ``"full"`` or ``"head"``.
        factors: f of each projection; None is 1. The norm-preserving form
            s (W + lambda I) has f = s and s lambda among ``scales``.

    Returns:
        A new tensor [P * D, E]. The gradient with respect to W is f times that
        with respect to the result, since C is a constant.
    """
    require_whole(weight)
    if factors is None:
        conditioned = weight.clone(memory_format=torch.contiguous_format)
    else:
        conditioned = _scale_rows(weight, factors, layout)
    diagonal = identity_diagonal(conditioned, layout, scope)
    if len(set(scales)) == 1:
        diagonal.add_(scales[0])
    else:
        for p, scale in enumerate(scales):
            diagonal[p].add_(scale)
    return conditioned


def identity_output(x: Tensor, rows: int, scales: Sequence[float], layout: ProjectionLayout, scope: str) -> Tensor:
    """Return x C^T without forming C.

    Args:
        x: Tokens [..., E].
        rows: P * D, the output features.
        scales: lambda of each projection.
        layout: Rows of the weight.
        scope: ``"full"`` or ``"head"``.

    Returns:
        A tensor [..., P * D] in the dtype of ``x``.
    """
    _check_scope(scope)
    E, h = x.shape[-1], layout.num_heads
    d = layout.rows_per_head(rows)
    if scope == "head":
        block = _fit_last(x, d).unsqueeze(-2).expand(*x.shape[:-1], h, d)  # [..., h, d]
    else:
        block = _fit_last(x, h * d).unflatten(-1, (h, d))  # [..., h, d]
    projections = torch.stack([block * scale for scale in scales], dim=-3)  # [..., P, h, d]
    if layout.row_order == "[heads][3][d]":
        if scope == "full" and h * d != E:
            raise ValueError(f"scope 'full' on rows {layout.row_order} needs a square projection, got {h * d} x {E}.")
        projections = projections.transpose(-3, -2)  # [..., h, P, d]
    return projections.flatten(-3)


def conditioned_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Sequence[float],
    layout: ProjectionLayout,
    scope: str,
    factors: Sequence[float] | None = None,
) -> Tensor:
    """Apply x (W + C)^T + b with C = lambda * I_k on each projection, or x (f W + C)^T + b.

    In float32 and float64 the identity goes onto the weight, which is the
    cheapest form. In float16 and bfloat16 (by cast or by autocast) rounding
    W + C would lose the learned diagonal beside lambda, so x W^T and lambda x
    are computed apart, summed in float32 and rounded once.

    Args:
        x: Tokens [..., E].
        weight: W [P * D, E].
        bias: b [P * D] or None.
        scales: lambda of each projection, in the order of ``layout.roles``.
        layout: Rows of the weight.
        scope: ``"full"`` or ``"head"``.
        factors: See :func:`add_identity`.

    Returns:
        A tensor [..., P * D] in the dtype in which ``F.linear`` computes.
    """
    if product_dtype(x, weight).itemsize < 4:
        identity = identity_output(x.float(), weight.shape[0], scales, layout, scope)
        if factors is None:
            y = F.linear(x, weight, bias)
            return (y.float() + identity).to(y.dtype)
        y = F.linear(x, weight)
        scaled = _scale_rows(y.float().movedim(-1, 0), factors, layout).movedim(0, -1) + identity
        return (scaled if bias is None else scaled + bias.float()).to(y.dtype)
    factors = None if factors is None else tuple(factors)
    if torch.is_grad_enabled():
        return _ConditionedLinear.apply(x, weight, bias, tuple(scales), layout, scope, factors)
    return F.linear(x, add_identity(weight, scales, layout, scope, factors), bias)


class _ConditionedLinear(torch.autograd.Function):
    """x (W + C)^T + b that keeps W, not W + C, for the backward pass.

    Autograd on ``F.linear(x, W + C)`` would hold a second copy of every
    conditioned weight until the backward pass; here it is made again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, scales, layout, scope, factors):
        return F.linear(x, add_identity(weight, scales, layout, scope, factors), bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, ctx.scales, ctx.layout, ctx.scope, ctx.factors = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            grad_x = grad @ add_identity(weight, ctx.scales, ctx.layout, ctx.scope, ctx.factors)
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
            if ctx.factors is not None:
                grad_weight = _scale_rows(grad_weight, ctx.factors, ctx.layout)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def split_projections(weight: Tensor, layout: ProjectionLayout, scope: str = "full") -> Tensor:
    """Return the matrices whose condition number the scope is about.

    Args:
        weight: Fused or separate weight [P * D, E].
        layout: Its rows.
        scope: ``"full"`` or ``"head"``.

    Returns:
        [P, D, E] for scope ``full``, [P, h, d, E] for scope ``head``.
    """
    _check_scope(scope)
    require_whole(weight)
    (rows, E), P, h = weight.shape, len(layout.roles), layout.num_heads
    d = layout.rows_per_head(rows)
    if layout.row_order == "[heads][3][d]":
        blocks = weight.view(h, P, d, E).transpose(0, 1)
    else:
        blocks = weight.view(P, h, d, E)
    return blocks if scope == "head" else blocks.reshape(P, h * d, E)


def merge_projections(blocks: Tensor, layout: ProjectionLayout) -> Tensor:
    """Put what :func:`split_projections` took apart, of either scope, back into one weight [P * D, E]."""
    P, h = len(layout.roles), layout.num_heads
    blocks = blocks.reshape(P, h, -1, blocks.shape[-1])  # [P, h, d, E]
    blocks = blocks.transpose(0, 1) if layout.row_order == "[heads][3][d]" else blocks
    return blocks.reshape(-1, blocks.shape[-1])


def require_whole(weight: Tensor) -> None:
    """Raise ValueError for a weight of which this rank has a part: a DTensor, or flat (FullyShardedDataParallel)."""
    if hasattr(weight, "full_tensor") or weight.dim() != 2:
        raise ValueError(
            f"a weight {list(weight.shape)} is kept in parts by several ranks, and this needs all of it. Do it before "
            "the model is sharded; or gather the weights, by torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), and load them into a model "
            "that is not. To train a correction with an interval, shard by fully_shard, not by "
            "FullyShardedDataParallel (mmengine's FSDPStrategy), or take interval=1."
        )


def norm_factors(
    scales: Sequence[float], shape: tuple[int, int], layout: ProjectionLayout, scope: str, std: float
) -> tuple[float, ...]:
    """Return the s of each projection with which s (W + lambda I) has the Frobenius norm of W, in expectation.

    Args:
        scales: lambda of each projection.
        shape: (P * D, E) of the weight.
        layout: Its rows.
        scope: ``"full"`` or ``"head"``.
        std: Standard deviation of the independent, centred entries of W at the start.
    """
    _check_scope(scope)
    (rows, E), h = shape, layout.num_heads
    d = layout.rows_per_head(rows)
    ones = h * min(d, E) if scope == "head" else min(h * d, E)
    learned = h * d * E * std**2  # expected |W|_F^2; W and C are orthogonal in expectation
    return tuple(math.sqrt(learned / (learned + ones * scale**2)) for scale in scales)


def _scale_rows(matrix: Tensor, factors: Sequence[float], layout: ProjectionLayout) -> Tensor:
    """Multiply the rows of each projection in [P * D, ...] by its factor, out of place."""
    P, h = len(layout.roles), layout.num_heads
    if layout.row_order == "[heads][3][d]":
        blocks, dim = matrix.unflatten(0, (h, P, -1)), 1
    else:
        blocks, dim = matrix.unflatten(0, (P, h, -1)), 0
    scaled = [block * factor for block, factor in zip(blocks.unbind(dim), factors, strict=True)]
    return torch.stack(scaled, dim).flatten(0, 2)


def _fit_last(x: Tensor, size: int) -> Tensor:
    """Cut or zero-pad the last dimension, as a rectangular identity does."""
    return x[..., :size] if x.shape[-1] >= size else F.pad(x, (0, size - x.shape[-1]))


def _check_scope(scope: str) -> None:
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}.")

"""The fast path of :mod:`mmspectral.ops.random_features.attention` as operators that ``torch.compile`` need not unroll.

``mmspectral::linear_attention`` and ``mmspectral::linear_attention_backward``
recompute features chunk by chunk: what is kept for the gradient is the output
and, of the features, two vectors (non-causal: lse [G, m] and mean [G, m, e];
causal: one normaliser per query).
"""

import torch
from torch import Tensor

from mmspectral.ops.random_features import causal as causal_form
from mmspectral.ops.random_features.chunked import (
    KeyMap,
    attend_backward,
    attend_forward,
    float32_island,
    key_state,
    state_backward,
)
from mmspectral.ops.random_features.features import Features


@torch.library.custom_op("mmspectral::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    norm_weight: Tensor,
    log_weight: Tensor,
    shift: Tensor | None,
    mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [B, H, g, N, e] in the dtype of v, and what its gradient needs.

    Args:
        q: [B, H, g, N, d]; g queries share a key.
        k: [B, H, L, d].
        v: [B, H, L, e].
        rows: As in :class:`~mmspectral.ops.random_features.features.Features`, H of them or 1; so the next three.
        norm_weight: [H, r].
        log_weight: [H, m].
        shift: [H, d] or None.
        mask: [B, L], True for keys that may be seen, or None.
        causal: Query i sees keys 0 .. i only; then N = L.
    """
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    with float32_island(q.device):
        keys = KeyMap(Features(rows, norm_weight, log_weight, shift), *q.shape[:2])
        if causal:
            normaliser = causal_form.forward(q, k, v, keys, mask, out)
            return out, normaliser, rows.new_empty(0)
        lse, mean = key_state(k, v, keys, mask)
        attend_forward(q, keys, lse, mean, out)
    return out, lse, mean


@linear_attention.register_fake
def _(q, k, v, rows, norm_weight, log_weight, shift, mask, causal):
    G, m = q.shape[0] * q.shape[1], log_weight.shape[-1]
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    if causal:
        return out, rows.new_empty(G * q.shape[2], q.shape[3], 1), rows.new_empty(0)
    return out, rows.new_empty(G, m, 1), rows.new_empty(G, m, v.shape[-1])


@torch.library.custom_op("mmspectral::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    grad: Tensor,
    out: Tensor,
    first: Tensor,
    second: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    norm_weight: Tensor,
    log_weight: Tensor,
    shift: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    features_need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, rows and log_weight, the last two empty unless ``features_need_grad``."""
    with float32_island(q.device):
        keys = KeyMap(Features(rows, norm_weight, log_weight, shift), *q.shape[:2])
        if features_need_grad:
            keys.start_gradients()
        if causal:
            grads = causal_form.backward(q, k, v, keys, mask, out, first, grad)
            grad_q, grad_k, grad_v = (g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=True))
        else:
            grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
            grad_state = attend_backward(q, keys, first, second, out, grad, grad_q)
            state_backward(k, v, keys, mask, (first, second), grad_state, grad_k, grad_v)
        if not features_need_grad:
            return grad_q, grad_k, grad_v, rows.new_empty(0), rows.new_empty(0)
        grad_rows, grad_log_weight = (
            _sum_batch(t, q.shape[0], len(rows)) for t in (keys.grad_rows, keys.grad_log_weight[..., 0])
        )
    return grad_q, grad_k, grad_v, grad_rows, grad_log_weight


@linear_attention_backward.register_fake
def _(grad, out, first, second, q, k, v, rows, norm_weight, log_weight, shift, mask, causal, features_need_grad):
    grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    if not features_need_grad:
        return *grads, rows.new_empty(0), rows.new_empty(0)
    return *grads, rows.new_empty(rows.shape), log_weight.new_empty(log_weight.shape)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *unused):
    out, first, second, *tensors = ctx.saved_tensors
    need_rows, need_log_weight, need_shift = (ctx.needs_input_grad[i] for i in (3, 5, 6))
    grad_q, grad_k, grad_v, grad_rows, grad_log_weight = linear_attention_backward(
        grad, out, first, second, *tensors, ctx.causal, need_rows or need_log_weight
    )
    shift, grad_shift = tensors[6], None
    if need_shift:
        grad_shift = -grad_k.sum((0, 2), dtype=shift.dtype).sum_to_size(shift.shape)
    return (
        grad_q,
        grad_k,
        grad_v,
        grad_rows if need_rows else None,
        None,
        grad_log_weight if need_log_weight else None,
        grad_shift,
        None,
        None,
    )


linear_attention.register_autograd(_backward, setup_context=_setup_context)


def _sum_batch(grad: Tensor, batch: int, heads: int) -> Tensor:
    """Return the gradient [H, ...] of what was repeated over the batch and, if ``heads`` is 1, over heads."""
    grad = grad.view(batch, -1, *grad.shape[1:]).sum(0)
    return grad if heads == len(grad) else grad.sum(0, keepdim=True)

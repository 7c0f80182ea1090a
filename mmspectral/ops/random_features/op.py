r"""Attention of linear cost over positive random features: DARK (arXiv 2603.04127), Performer and their like.

One call serves all estimators, which differ in what ``fold_features`` was given:

===============  ========================================================
``dark``         M learned, per head or shared, of any rank; w fixed draws
``performer``    M None (FAVOR+)
``temperature``  M a scalar
``learned``      w itself trained, M None
``sharp``        any of them with a proposal from ``sharp_proposal``
``shift``        any of them with a shift of the keys
===============  ========================================================

Products, exponentials and sums run in float32, without TF32 and whatever
autocast says (float64 for float64 features); the result has the dtype of the
values. The operator ``mmspectral::linear_attention``, which ``torch.compile``
need not unroll, recomputes features chunk by chunk: what is kept for the
gradient is the output and, of the features, two vectors (non-causal: lse
[G, m] and mean [G, m, e]; causal: one normaliser per query).

Shape legend: B batch, h query heads, H key heads (h a multiple of H; query
heads t * h / H .. share key head t), N queries, L keys, d and e channels of
keys and values, m features.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mmspectral.ops.random_features import causal as causal_form
from mmspectral.ops.random_features.chunked import (
    KeyMap,
    attend_backward,
    attend_forward,
    float32_island,
    group_chunk,
    key_state,
    merge_state,
    state_backward,
)
from mmspectral.ops.random_features.features import Features


class FeatureState(NamedTuple):
    """All that linear attention remembers of the keys and values seen so far, whatever their number.

    Args:
        lse: log sum_n phi_j(k_n) [B, H, m], -inf as long as no key may be seen.
        mean: Mean of the values under the weights of each feature [B, H, m, e].
    """

    lse: Tensor
    mean: Tensor


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, features: Features, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return Phi(q) (Phi(k)^T v) / Phi(q) (Phi(k)^T 1), rows being queries.

    The activation memory does not grow with N * m: the backward pass
    recomputes features chunk by chunk. Differentiable once in q, k, v and in
    what the features were folded from.

    Args:
        q: [B, h, N, d].
        k: [B, H, L, d].
        v: [B, H, L, e].
        features: For 1 head, H or h. With h > H and h of them the keys are repeated.
        mask: [B, L], bool, True for keys that may be seen. A query that sees
            none gets 0 and gives no gradient.
        causal: Query i sees keys 0 .. i only; needs N = L.

    Returns:
        [B, h, N, e] in the dtype of v.

    Raises:
        ValueError: Shapes that do not fit.
        TypeError: A mask that is not boolean.
    """
    h, heads = q.shape[1], len(features.rows)
    _check(q, k, v, features, mask)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal attention needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}. To continue "
            "a sequence, keep a state: summarise_keys(...) for the new keys, then attend(...)."
        )
    if heads not in (1, k.shape[1]):
        k, v = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
    if _transformed(q, k, v, *features):
        return _explicit(q, k, v, features, mask, causal)
    out, *_ = _operator(q.unflatten(1, (k.shape[1], -1)), k, v, *features, mask, causal)  # [B, H, g, N, e]
    return out.flatten(1, 2)


def summarise_keys(
    k: Tensor, v: Tensor, features: Features, mask: Tensor | None = None, state: FeatureState | None = None
) -> FeatureState:
    """Return the state of these keys and, if given, of those before; for decoding and for a fixed context.

    Decoding one token is ``state = summarise_keys(k, v, features, state=state)``,
    then ``attend(q, features, state)``, with one token in q, k and v. Without gradient.

    Args:
        k: [B, H, L, d].
        v: [B, H, L, e].
        features: For 1 head or H.
        mask: [B, L], bool, True for keys that may be seen.
        state: Of earlier keys.
    """
    _check(k, k, v, features, mask)
    with torch.no_grad(), float32_island(k.device):
        keys = KeyMap(features, *k.shape[:2])
        lse, mean = key_state(k, v, keys, mask)
        lse, mean = lse.unflatten(0, k.shape[:2]), mean.unflatten(0, k.shape[:2])
        if state is not None:
            lse, mean = merge_state(state.lse[..., None], state.mean, lse, mean)
    return FeatureState(lse[..., 0], mean)


def attend(q: Tensor, features: Features, state: FeatureState) -> Tensor:
    """Return the attention to all keys of a state, [B, h, N, e] in the dtype of q; without gradient."""
    B, H = state.lse.shape[:2]
    out = q.new_empty(*q.shape[:-1], state.mean.shape[-1])
    with torch.no_grad(), float32_island(q.device):
        keys = KeyMap(features, B, H)
        lse, mean = state.lse.flatten(0, 1)[..., None], state.mean.flatten(0, 1)
        attend_forward(q.unflatten(1, (H, -1)), keys, lse, mean, out.unflatten(1, (H, -1)))
    return out


def kernel_logits(q: Tensor, k: Tensor, features: Features) -> Tensor:
    """Return the logarithm of the estimate of exp(scale q^T Sigma (k - c)), [B, h, N, L].

    Its softmax over the keys is what :func:`linear_attention` weighs values
    with. Of quadratic cost: for inspection. An estimate too small for the
    dtype relative to the largest of its row is -inf.

    Args:
        q: [B, h, N, d].
        k: [B, h, L, d].
        features: For 1 head or h.
    """
    B, h, N, _ = q.shape
    with float32_island(q.device):
        keys = KeyMap(features, B, h)
        q, k = (group_chunk(t, slice(None), keys.dtype) for t in (q, k))
        kappa, _ = keys.logits(keys.shifted(k), None)  # [G, m, L]
        largest = kappa.amax(-1, keepdim=True)
        tau = q @ keys.feature_rows.mT + largest.mT  # [G, N, m]
        row = tau.amax(-1, keepdim=True)
        logits = ((tau - row).exp() @ (kappa - largest).exp()).log() + row
        first = q @ keys.rows[:, : keys.rank].mT
        half_norm = first.square() @ keys.norm_weight / 2  # [G, N, 1]
        return (logits - half_norm - math.log(keys.num_features)).unflatten(0, (B, h))


def _transformed(*tensors: Tensor | None) -> bool:
    """Return whether ``torch.func`` transforms the call, or tangents go in, neither of which an operator follows."""
    if torch.compiler.is_compiling():
        return False
    # No public function tells whether a transform is on.
    tangents = (forward_ad.unpack_dual(t).tangent for t in tensors if t is not None)
    return torch._C._functorch.peek_interpreter_stack() is not None or any(t is not None for t in tangents)


def _explicit(q: Tensor, k: Tensor, v: Tensor, features: Features, mask: Tensor | None, causal: bool) -> Tensor:
    """Return what :func:`linear_attention` does, of quadratic cost and differentiable in every way."""
    B, h = q.shape[:2]
    features = Features(*(t if t is None else t.repeat_interleave(h // len(t), 0) for t in features))
    keys = KeyMap(features, B, h)
    q, k, values = (t.repeat_interleave(h // t.shape[1], 1).flatten(0, 1).to(keys.dtype) for t in (q, k, v))
    seen = q.new_ones(B * h, q.shape[1], k.shape[1]) if mask is None else mask.repeat_interleave(h, 0)[:, None].to(q)
    with float32_island(q.device):
        y = keys.rows @ keys.shifted(k).mT
        kappa = y[:, keys.offset :] - (y[:, : keys.rank].square() * keys.norm_weight).sum(1, keepdim=True) / 2
        kappa = kappa + keys.log_weight if keys.weighted else kappa  # [G, m, L]
        largest = kappa.detach().amax(-1, keepdim=True)
        tau = q @ keys.feature_rows.mT + largest.mT  # [G, N, m]
        weights = (tau - tau.detach().amax(-1, keepdim=True)).exp() @ (kappa - largest).exp()
        weights = weights * (seen.expand_as(weights).tril() if causal else seen)
        total = weights.sum(-1, keepdim=True)
        out = weights @ values / torch.where(total > 0, total, 1.0)
    return out.unflatten(0, (B, h)).to(v.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, features: Features, mask: Tensor | None) -> None:
    h, H, heads, d = q.shape[1], k.shape[1], len(features.rows), features.rows.shape[-1]
    if h % H or v.shape[:3] != k.shape[:3] or not q.shape[-1] == k.shape[-1] == d or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and features of {d} channels do not fit: "
            "needed are [B, h, N, d], [B, H, L, d], [B, H, L, e] with h a multiple of H."
        )
    if heads not in (1, H, h):
        raise ValueError(f"features are for {heads} heads; there are {h} query heads and {H} key heads.")
    check_mask(mask, k)


def check_mask(mask: Tensor | None, k: Tensor) -> None:
    """Raise TypeError or ValueError for a mask that is not [B, L], bool, of keys [B, H, L, d]."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True for keys that may be seen, got {mask.dtype}.")
    if mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"mask must be [B, L] = {[k.shape[0], k.shape[2]]}, got {list(mask.shape)}: it can hide keys from all "
            "queries alike, not from some of them (but for causal=True)."
        )


@torch.library.custom_op("mmspectral::linear_attention", mutates_args=())
def _operator(
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
    """Return the output [B, H, g, N, e] in the dtype of v, and what its gradient needs; g queries share a key."""
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    with float32_island(q.device):
        keys = KeyMap(Features(rows, norm_weight, log_weight, shift), *q.shape[:2])
        if causal:
            normaliser = causal_form.forward(q, k, v, keys, mask, out)
            return out, normaliser, rows.new_empty(0)
        lse, mean = key_state(k, v, keys, mask)
        attend_forward(q, keys, lse, mean, out)
    return out, lse, mean


@_operator.register_fake
def _(q, k, v, rows, norm_weight, log_weight, shift, mask, causal):
    G, m = q.shape[0] * q.shape[1], log_weight.shape[-1]
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    if causal:
        return out, rows.new_empty(G * q.shape[2], q.shape[3], 1), rows.new_empty(0)
    return out, rows.new_empty(G, m, 1), rows.new_empty(G, m, v.shape[-1])


@torch.library.custom_op("mmspectral::linear_attention_backward", mutates_args=())
def _operator_backward(
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


@_operator_backward.register_fake
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
    grad_q, grad_k, grad_v, grad_rows, grad_log_weight = _operator_backward(
        grad, out, first, second, *tensors, ctx.causal, need_rows or need_log_weight
    )
    shift, grad_shift = tensors[6], None
    if need_shift:
        grad_shift = -grad_k.sum((0, 2), dtype=shift.dtype).sum_to_size(shift.shape)
    of_features = (grad_rows if need_rows else None, None, grad_log_weight if need_log_weight else None, grad_shift)
    return grad_q, grad_k, grad_v, *of_features, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _sum_batch(grad: Tensor, batch: int, heads: int) -> Tensor:
    grad = grad.view(batch, -1, *grad.shape[1:]).sum(0)
    return grad if heads == len(grad) else grad.sum(0, keepdim=True)

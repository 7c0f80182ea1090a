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
    attend_at_once,
    attend_backward,
    attend_forward,
    float32_island,
    group_chunk,
    key_state,
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    mask: Tensor | None = None,
    causal: bool = False,
    state: FeatureState | None = None,
) -> Tensor:
    """Return Phi(q) (Phi(k)^T v) / Phi(q) (Phi(k)^T 1), rows being queries.

    The activation memory does not grow with N * m: the backward pass
    recomputes features chunk by chunk. Differentiable once in q, k, v, the state
    and what the features were folded from.

    Args:
        q: [B, h, N, d].
        k: [B, H, L, d].
        v: [B, H, L, e].
        features: For 1 head, H or h. With h > H and h of them the keys are repeated.
        mask: [B, L], bool, True for keys that may be seen. A query that sees
            none gets 0 and gives no gradient.
        causal: Query i sees keys 0 .. i only; needs N = L.
        state: Of keys that all queries see beside these (:func:`summarise_keys`).

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
            "a sequence, give the new tokens alone, and the state=summarise_keys(...) of those before."
        )
    if state is not None and (state.lse.shape, state.mean.shape) != (
        (shape := (*k.shape[:2], features.num_features)),
        (*shape, v.shape[-1]),
    ):
        raise ValueError(
            f"the state's lse {tuple(state.lse.shape)} and mean {tuple(state.mean.shape)} must be [B, H, m] = "
            f"{list(shape)} and [B, H, m, e] = {[*shape, v.shape[-1]]}."
        )
    if heads not in (1, k.shape[1]):
        k, v = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
        state = None if state is None else [t.repeat_interleave(h // t.shape[1], 1) for t in state]
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, H, g, N, d]
    if _transformed(q, k, v, *features, *(state or ())):
        out = _explicit(grouped, k, v, features, mask, causal, state)
    else:
        out, *_ = _operator(grouped, k, v, *features, mask, causal, *(state or (None, None)))
    return out.flatten(1, 2)


def summarise_keys(
    k: Tensor, v: Tensor, features: Features, mask: Tensor | None = None, state: FeatureState | None = None
) -> FeatureState:
    """Return the state of these keys and, if given, of those before; for decoding and for a fixed context.

    Some tokens at a time, each step is ``linear_attention(q, k, v, features,
    causal=True, state=state)``, then ``state = summarise_keys(k, v, features,
    state=state)``. Without gradient.

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
        lse, mean = key_state(k, v, keys, mask, _start(keys, *state) if state else None)
    return FeatureState(lse[..., 0].unflatten(0, k.shape[:2]), mean.unflatten(0, k.shape[:2]))


def attend(q: Tensor, features: Features, state: FeatureState) -> Tensor:
    """Return the attention to all keys of a state, [B, h, N, e] in the dtype of q; without gradient."""
    B, H = state.lse.shape[:2]
    out = q.new_empty(*q.shape[:-1], state.mean.shape[-1])
    with torch.no_grad(), float32_island(q.device):
        keys = KeyMap(features, B, H)
        attend_forward(q.unflatten(1, (H, -1)), keys, *_start(keys, *state), out.unflatten(1, (H, -1)))
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


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, features: Features, mask: Tensor | None, causal: bool, state: FeatureState | None
) -> Tensor:
    """Return what the operator does, without chunks and differentiable in every way."""
    if state is not None:
        raise NotImplementedError(
            "attention over random features that starts from a state has no forward-mode derivative and is under no "
            "transform of torch.func; give it the keys and values themselves, or use torch.autograd.grad."
        )
    with float32_island(q.device):
        return attend_at_once(q, k, v, KeyMap(features, *k.shape[:2]), mask, causal)[0]


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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    norm_weight: Tensor,
    log_weight: Tensor,
    shift: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    state_lse: Tensor | None,
    state_mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [B, H, g, N, e] in the dtype of v, and what its gradient needs; g queries share a key."""
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    with float32_island(q.device):
        keys = KeyMap(Features(rows, norm_weight, log_weight, shift), *q.shape[:2])
        start = None if state_lse is None else _start(keys, state_lse, state_mean)
        if causal:
            normaliser = causal_form.forward(q, k, v, keys, mask, out, start)
            return out, normaliser, rows.new_empty(0)
        lse, mean = key_state(k, v, keys, mask, start)
        attend_forward(q, keys, lse, mean, out)
    return out, lse, mean


_operator = torch.library.custom_op("mmspectral::linear_attention", forward, mutates_args=())


@_operator.register_fake
def _(q, k, v, rows, norm_weight, log_weight, shift, mask, causal, state_lse, state_mean):
    G, m = q.shape[0] * q.shape[1], log_weight.shape[-1]
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    if causal:
        return out, rows.new_empty(G * q.shape[2], q.shape[3], 1), rows.new_empty(0)
    return out, rows.new_empty(G, m, 1), rows.new_empty(G, m, v.shape[-1])


def backward(
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
    state_lse: Tensor | None,
    state_mean: Tensor | None,
    features_need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, rows, log_weight and the state.

    Those of rows and log_weight are empty unless ``features_need_grad``, those of
    the state where there is none.
    """
    with float32_island(q.device):
        keys = KeyMap(Features(rows, norm_weight, log_weight, shift), *q.shape[:2])
        start = None if state_lse is None else _start(keys, state_lse, state_mean)
        if features_need_grad:
            keys.start_gradients()
        if causal:
            *grads, grad_start = causal_form.backward(q, k, v, keys, mask, out, first, grad, start)
            grad_q, grad_k, grad_v = (g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=True))
        else:
            grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
            grad_state = attend_backward(q, keys, first, second, out, grad, grad_q)
            grad_start = state_backward(k, v, keys, mask, (first, second), grad_state, grad_k, grad_v, start)
        grads = [grad_q, grad_k, grad_v, *(rows.new_empty(0) for _ in range(4))]
        if features_need_grad:
            grads[3] = _sum_batch(keys.grad_rows, q.shape[0], len(rows))
            grads[4] = _sum_batch(keys.grad_log_weight[..., 0], q.shape[0], len(rows))
        if start is not None:
            grads[5] = grad_start[0].view_as(state_lse).to(state_lse.dtype)
            grads[6] = grad_start[1].view_as(state_mean).to(state_mean.dtype)
    return tuple(grads)


_operator_backward = torch.library.custom_op("mmspectral::linear_attention_backward", backward, mutates_args=())


@_operator_backward.register_fake
def _(
    grad, out, first, second, q, k, v, rows, norm_weight, log_weight, shift, mask, causal, state_lse, state_mean,
    features_need_grad,
):  # fmt: skip
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    given = [rows, log_weight] if features_need_grad else [None, None]
    for tensor in (*given, state_lse, state_mean):
        grads.append(rows.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape))
    return tuple(grads)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.causal, state_lse, state_mean = inputs
    ctx.save_for_backward(*output, *tensors, state_lse, state_mean)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *unused):
    out, first, second, *tensors, state_lse, state_mean = ctx.saved_tensors
    need_rows, need_log_weight, need_shift = (ctx.needs_input_grad[i] for i in (3, 5, 6))
    grad_q, grad_k, grad_v, grad_rows, grad_log_weight, *grad_state = _operator_backward(
        grad, out, first, second, *tensors, ctx.causal, state_lse, state_mean, need_rows or need_log_weight
    )
    shift, grad_shift = tensors[6], None
    if need_shift:
        grad_shift = -grad_k.sum((0, 2), dtype=shift.dtype).sum_to_size(shift.shape)
    of_features = (grad_rows if need_rows else None, None, grad_log_weight if need_log_weight else None, grad_shift)
    of_state = (None, None) if state_lse is None else grad_state
    return grad_q, grad_k, grad_v, *of_features, None, None, *of_state


_operator.register_autograd(_backward, setup_context=_setup_context)


def _refuse_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "attention over random features is differentiable once; for a second derivative use exact attention "
        "(kernel=None), or finite differences of the gradient."
    )


_operator_backward.register_autograd(_refuse_second_derivative)


def plain_forward(q, k, v, rows, norm_weight, log_weight, shift, mask, causal, state_lse, state_mean):
    """As :func:`forward` in operators that any runtime has, such as ONNX's; memory grows with N * m.

    Raises:
        NotImplementedError: Causal attention, whose safe form is a loop, or a state.
    """
    if causal or state_lse is not None:
        raise NotImplementedError("causal attention over random features has no form in plain operators.")
    return attend_at_once(q, k, v, KeyMap(Features(rows, norm_weight, log_weight, shift), *q.shape[:2]), mask, causal)


PLAIN_OPERATORS = {torch.ops.mmspectral.linear_attention.default: plain_forward}  # a table of decompositions


def _start(keys: KeyMap, lse: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return a state as lse [G, m, 1] and mean [G, m, e] in the dtype of the features."""
    return lse.to(keys.dtype).flatten(0, 1)[..., None], mean.to(keys.dtype).flatten(0, 1)


def _sum_batch(grad: Tensor, batch: int, heads: int) -> Tensor:
    grad = grad.view(batch, -1, *grad.shape[1:]).sum(0)
    return grad if heads == len(grad) else grad.sum(0, keepdim=True)

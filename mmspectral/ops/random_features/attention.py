r"""Attention of linear cost over positive random features: DARK (arXiv 2603.04127), Performer and their like.

One call serves all estimators, which differ in what
:func:`~mmspectral.ops.random_features.features.fold_features` was given:

===============  ========================================================
``dark``         M learned, per head or shared, of any rank; w fixed draws
``performer``    M None (FAVOR+)
``temperature``  M a scalar
``learned``      w itself trained, M None
``sharp``        any of them with a proposal from ``sharp_proposal``
``shift``        any of them with a shift of the keys
===============  ========================================================

Exact softmax, uniform and constant attention, for comparison, are in
:mod:`mmspectral.ops.random_features.baselines`. Products, exponentials and sums run
in float32, without TF32 and whatever autocast says (float64 for float64
features); the result has the dtype of the values.

Shape legend: B batch, h query heads, H key heads (h a multiple of H; query
heads t * h / H .. share key head t), N queries, L keys, d and e channels of
keys and values, m features.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mmspectral.ops.random_features import op as operators
from mmspectral.ops.random_features.chunked import (
    KeyMap,
    attend_forward,
    float32_island,
    group_chunk,
    key_state,
    merge_state,
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
            "a sequence, keep a state: key_state(...) for the new keys, then attend(...)."
        )
    if heads not in (1, k.shape[1]):
        k, v = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
    out = operators.linear_attention(q.unflatten(1, (k.shape[1], -1)), k, v, *features, mask, causal)[
        0
    ]  # [B, H, g, N, e]
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
    """Return the attention to all keys of a state, [B, h, N, e] in the dtype of q; without gradient.

    Args:
        q: [B, h, N, d].
        features: Those that the state was made with.
        state: Of :func:`summarise_keys`.
    """
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


def _check(q: Tensor, k: Tensor, v: Tensor, features: Features, mask: Tensor | None) -> None:
    h, H, heads, d = q.shape[1], k.shape[1], len(features.rows), features.rows.shape[-1]
    if h % H or v.shape[:3] != k.shape[:3] or not q.shape[-1] == k.shape[-1] == d or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and features of {d} channels do not fit: "
            "needed are [B, h, N, d], [B, H, L, d], [B, H, L, e] with h a multiple of H."
        )
    if heads not in (1, H, h):
        raise ValueError(f"features are for {heads} heads; there are {h} query heads and {H} key heads.")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True for keys that may be seen, got {mask.dtype}.")
    if mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"mask must be [B, L] = {[k.shape[0], k.shape[2]]}, got {list(mask.shape)}: attention of linear cost can "
            "hide keys from all queries alike, not from some of them (but for causal=True)."
        )

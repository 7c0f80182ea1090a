r"""Attention over random features in chunks, forward and backward by hand, so that no N x m tensor is kept.

With the logits kappa_nj = log phi_j(k_n) of the keys and tau_ij of the queries
the output is two softmax attentions in a row: every feature j attends to the
keys, then every query to the features,

    lse_j = log sum_n exp kappa_nj          mean_j = sum_n exp(kappa_nj - lse_j) v_n
    out_i = sum_j p_ij mean_j               p_i. = softmax_j(tau_ij + lse_j)

so nothing can overflow, and every denominator, taken relative to the largest
term of its own softmax, is at least 1 as soon as one key may be seen. The
norm |M q|^2 / 2 of a query is the same for all features and cancels.

Shape legend: G = B * H (image, head) pairs, n tokens of a chunk, d and e
channels of keys and values, m features, r rank of M, R rows
(:class:`mmspectral.ops.random_features.features.Features`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mmspectral.ops.precision import without_autocast
from mmspectral.ops.random_features.features import Features

# Bytes of one tensor [G, n, R] of a chunk: within the cache of a CPU, enough to fill a GPU.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 3 << 20, 64 << 20
MIN_CHUNK = 64


@contextmanager
def float32_island(device: torch.device) -> Iterator[None]:
    """Switch off autocast, TF32 and bfloat16 products: logits are exponentiated and cannot afford them."""
    settings = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    previous = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        with without_autocast(device):
            yield
    finally:
        for setting, precision in zip(settings, previous, strict=True):
            setting.fp32_precision = precision


def chunks(
    length: int, groups: int, rows: int, device: torch.device, multiple: int | None = None, most: int | None = None
) -> Iterator[slice]:
    """Yield slices of at most as many tokens as keep [groups, n, rows] in float32 within a budget.

    With ``multiple`` they are that number of tokens at least, and times a whole
    number up to ``most``.
    """
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    size = budget // (4 * groups * rows)
    size = max(MIN_CHUNK, size) if multiple is None else min(max(1, size // multiple), most) * multiple
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def finite(lse: Tensor) -> Tensor:
    """Return lse with 0 for -inf, so that exp(-inf - lse) is 0 where no key may be seen."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


class KeyMap:
    """The way from a chunk of keys to its logits and back."""

    def __init__(self, features: Features, batch: int, heads: int) -> None:
        rows, norm_weight, log_weight, shift = (
            None if t is None else t.expand(batch, heads, *t.shape[1:]).flatten(0, 1) for t in features
        )
        self.rows, self.norm_weight, self.log_weight = rows, norm_weight[..., None], log_weight[..., None]
        self.shift = None if shift is None else shift[:, None]
        self.dtype = rows.dtype
        self.rank, self.num_features = norm_weight.shape[-1], log_weight.shape[-1]
        self.offset = rows.shape[1] - self.num_features  # r if the norm has rows of its own, else 0
        self.feature_rows = rows[:, self.offset :]  # [G, m, d]
        self.weighted = self.offset > 0  # features that lend their norm are never weighted
        self.grad_rows = self.grad_log_weight = None

    def shifted(self, k: Tensor) -> Tensor:
        """Return k - c; k [G, n, d]."""
        return k if self.shift is None else k - self.shift

    def logits(self, k: Tensor, mask: Tensor | None, by_token: bool = False) -> tuple[Tensor, Tensor]:
        """Return kappa [G, m, n] and the gradient of |M k|^2 / 2 by the first rows [G, r, n].

        With ``by_token`` both, and what is in memory, are transposed: [G, n, m] and
        [G, n, r]; the mask is [G, 1, n] in either case.
        """
        y = k @ self.rows.mT if by_token else self.rows @ k.mT  # [G, n, R] or [G, R, n]
        turned = (lambda t: t.mT) if by_token else (lambda t: t)
        features = -1 if by_token else 1
        first = y.narrow(features, 0, self.rank)
        scaled = first * turned(self.norm_weight) if self.offset == 0 else first
        half_norm = (first * scaled).sum(features, keepdim=True).mul_(0.5)
        kappa = y.narrow(features, self.offset, self.num_features).sub_(half_norm)
        if self.weighted:
            kappa.add_(turned(self.log_weight))
        if mask is not None:
            kappa.masked_fill_(turned(~mask), -torch.inf)
        return kappa, scaled

    def start_gradients(self) -> None:
        """Begin to accumulate the gradients of the rows and weights, which is otherwise left out."""
        self.grad_rows = torch.zeros_like(self.rows)
        self.grad_log_weight = torch.zeros_like(self.log_weight)  # stays 0 for features that are never weighted

    def backward(self, grad_kappa: Tensor, k: Tensor, scaled: Tensor, by_token: bool = False) -> Tensor:
        """Return the gradient of the chunk's keys [G, n, d] and add up those of rows and weights."""
        features, tokens = (-1, 1) if by_token else (1, -1)
        per_key = grad_kappa.sum(features, keepdim=True)
        if self.weighted and self.grad_log_weight is not None:
            self.grad_log_weight += grad_kappa.sum(tokens).unsqueeze(-1)
        if self.offset:
            grad_y = torch.cat([-scaled * per_key, grad_kappa], dim=features)
        else:
            grad_y = grad_kappa
            grad_y.narrow(features, 0, self.rank).addcmul_(scaled, per_key, value=-1)
        grad_y, turned = (grad_y, grad_y.mT) if by_token else (grad_y.mT, grad_y)
        if self.grad_rows is not None:
            self.grad_rows.baddbmm_(turned, k)
        return grad_y @ self.rows

    def query_backward(self, grad_tau: Tensor, q: Tensor) -> Tensor:
        """Return the gradient of queries q [G, n, d] from that of tau [G, n, m], adding up that of the rows."""
        if self.grad_rows is not None:
            self.grad_rows[:, self.offset :].baddbmm_(grad_tau.mT, q)
        return grad_tau @ self.feature_rows


def normalise(logits: Tensor, dim: int, hidden: bool) -> tuple[Tensor, Tensor]:
    """Return softmax and logsumexp (of size 1) along ``dim``; 0 and -inf where all logits are -inf, if ``hidden``.

    The weights add up to 1 to rounding however large the logits are, which
    exp(logits - lse) does not: lse is rounded to their size.
    """
    largest = logits.amax(dim, keepdim=True)
    weights = logits.softmax(dim)
    lse = largest - weights.amax(dim, keepdim=True).log()
    if not hidden:
        return weights, lse
    empty = largest == -torch.inf  # a softmax of nothing but -inf is NaN
    return weights.masked_fill_(empty, 0.0), torch.where(empty, largest, lse)


def merge_state(lse: Tensor, mean: Tensor, new_lse: Tensor, new_mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return logsumexp [..., 1] and weighted mean [..., e] of two disjoint sets of keys together."""
    share = torch.sigmoid(finite(lse) - finite(new_lse))  # convex, so that constant values stay constant
    share = share.masked_fill(lse == -torch.inf, 0.0).masked_fill(new_lse == -torch.inf, 1.0)
    return torch.logaddexp(lse, new_lse), torch.lerp(new_mean, mean, share)


def group_chunk(x: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
    """Return a chunk of x [B, H, g, N, d] as [B * H, g * n, d] (g may be absent)."""
    x = x[..., tokens, :].to(dtype)
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])


def mask_chunk(mask: Tensor | None, heads: int, tokens: slice) -> Tensor | None:
    """Return a chunk of the mask [B, L] as [B * H, 1, n]."""
    return None if mask is None else mask[:, None, None, tokens].expand(-1, heads, -1, -1).flatten(0, 1)


def key_state(
    k: Tensor, v: Tensor, keys: KeyMap, mask: Tensor | None, start: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return lse [G, m, 1] and mean [G, m, e] of all keys, and of those of ``start``.

    Args:
        k: [B, H, L, d].
        v: [B, H, L, e].
        keys: Of the features.
        mask: [B, L].
        start: What is returned, of other keys.
    """
    G, m = keys.rows.shape[0], keys.num_features
    lse, mean = start or (keys.rows.new_full((G, m, 1), -torch.inf), keys.rows.new_zeros(G, m, v.shape[-1]))
    for tokens in chunks(k.shape[2], G, keys.rows.shape[1], k.device):
        seen = mask_chunk(mask, k.shape[1], tokens)
        kappa, _ = keys.logits(keys.shifted(group_chunk(k, tokens, keys.dtype)), seen)
        weights, new_lse = normalise(kappa, -1, hidden=mask is not None)
        lse, mean = merge_state(lse, mean, new_lse, weights @ group_chunk(v, tokens, keys.dtype))
    return lse, mean


def attend_forward(q: Tensor, keys: KeyMap, lse: Tensor, mean: Tensor, out: Tensor) -> None:
    """Write the attention of q [B, H, g, N, d] to the features into out [B, H, g, N, e]."""
    G, g = keys.rows.shape[0], q.shape[2]
    bias = finite(lse).mT  # [G, 1, m]
    for tokens in chunks(q.shape[3], G * g, keys.num_features, q.device):
        tau = torch.baddbmm(bias, group_chunk(q, tokens, keys.dtype), keys.feature_rows.mT)
        out[..., tokens, :] = (tau.softmax(-1) @ mean).view(*out.shape[:3], -1, out.shape[-1])


def attend_backward(
    q: Tensor, keys: KeyMap, lse: Tensor, mean: Tensor, out: Tensor, grad: Tensor, grad_q: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of q and return those of lse [G, m, 1] and mean [G, m, e]."""
    G, g = keys.rows.shape[0], q.shape[2]
    bias = finite(lse).mT
    grad_lse, grad_mean = torch.zeros_like(bias), torch.zeros_like(mean)
    for tokens in chunks(q.shape[3], G * g, keys.num_features, q.device):
        q_chunk, out_chunk, grad_chunk = (group_chunk(t, tokens, keys.dtype) for t in (q, out, grad))
        p = torch.baddbmm(bias, q_chunk, keys.feature_rows.mT).softmax(-1)  # [G, gn, m]
        grad_mean.baddbmm_(p.mT, grad_chunk)
        average = (out_chunk * grad_chunk).sum(-1, keepdim=True)  # of the gradient of p under p
        grad_tau = torch.baddbmm(average, grad_chunk, mean.mT, beta=-1).mul_(p)
        grad_lse += grad_tau.sum(1, keepdim=True)
        grad_q[..., tokens, :] = keys.query_backward(grad_tau, q_chunk).view(*q.shape[:3], -1, q.shape[-1])
    return grad_lse.mT, grad_mean


def state_backward(
    k: Tensor,
    v: Tensor,
    keys: KeyMap,
    mask: Tensor | None,
    state: tuple[Tensor, Tensor],
    grad_state: tuple[Tensor, Tensor],
    grad_k: Tensor,
    grad_v: Tensor,
    start: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor] | None:
    """Write the gradients of k and v for those of lse and mean, and return those of ``start``, if there is one.

    Arguments as for :func:`key_state`.
    """
    (lse, mean), (grad_lse, grad_mean) = state, grad_state
    lse = finite(lse)
    constant = grad_lse - (mean * grad_mean).sum(-1, keepdim=True)  # [G, m, 1]
    for tokens in chunks(k.shape[2], keys.rows.shape[0], keys.rows.shape[1], k.device):
        k_chunk, v_chunk = keys.shifted(group_chunk(k, tokens, keys.dtype)), group_chunk(v, tokens, keys.dtype)
        kappa, scaled = keys.logits(k_chunk, mask_chunk(mask, k.shape[1], tokens))
        weights = kappa.sub_(lse).exp_()  # [G, m, n]
        grad_v[:, :, tokens] = (weights.mT @ grad_mean).view(*v.shape[:2], -1, v.shape[-1])
        grad_kappa = torch.baddbmm(constant, grad_mean, v_chunk.mT).mul_(weights)
        grad_k[:, :, tokens] = keys.backward(grad_kappa, k_chunk, scaled).view(*k.shape[:2], -1, k.shape[-1])
    if start is None:
        return None
    weight = (start[0] - lse).exp()
    return weight * (constant + (start[1] * grad_mean).sum(-1, keepdim=True)), weight * grad_mean


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, keys: KeyMap, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention [B, H, g, N, e], lse and mean in plain operators without chunks or branches, for export."""
    shape = q.shape
    y = keys.rows @ keys.shifted(group_chunk(k, slice(None), keys.dtype)).mT  # [G, R, L]
    half_norm = (y[:, : keys.rank].square() * keys.norm_weight).sum(1, keepdim=True) / 2
    kappa = y[:, keys.offset :] - half_norm + keys.log_weight
    if mask is not None:
        kappa = torch.where(mask_chunk(mask, k.shape[1], slice(None)), kappa, -torch.inf)
    largest = finite(kappa.amax(-1, keepdim=True))
    weights = (kappa - largest).exp()
    total = weights.sum(-1, keepdim=True)
    mean = (weights @ group_chunk(v, slice(None), keys.dtype)) / torch.where(total == 0, 1.0, total)
    lse = largest + total.log()
    p = (group_chunk(q, slice(None), keys.dtype) @ keys.feature_rows.mT + finite(lse).mT).softmax(-1)
    return (p @ mean).reshape(*shape[:-1], v.shape[-1]).to(v.dtype), lse, mean

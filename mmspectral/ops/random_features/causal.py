r"""Causal attention over random features: chunks at once, joined by the states of earlier and of later ones.

Query i sees the keys n <= i. With b_j at least the largest kappa_nj that chunk
and state hold, the weight of a key is a product of two exponentials,

    exp(tau_ij + kappa_nj) = exp(tau_ij + b_j) exp(kappa_nj - b_j),

so that a chunk takes three matrix products. Its one maximum per feature counts
keys that some queries may not see, and where those are far larger than all
that a query does see, every term of the query underflows. So this is done where
the logits of each feature keep within ``safe_range``; elsewhere chunks are short
and each pair gets a logarithm of its own, log sum_j exp(tau_ij + kappa_nj).

The backward pass gets every weight from the log-normalisers
L_i = log sum_{n <= i} sum_j exp(tau_ij + kappa_nj) alone. Going forward it needs
the states of earlier keys for the gradient of the queries; going back, the sums
over later queries, relative to the largest tau_ij - L_i of each feature, for that
of the keys: kappa_nj + tau_ij <= L_i for every later query, so these exponentials
are at most 1.

Shape legend: G = B * H * g (image, query head) pairs, N tokens, S chunks of C
tokens (padded with keys that are not seen); d, e channels of keys and values,
m features.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspectral.ops.random_features.chunked import KeyMap, chunks, finite, group_chunk, mask_chunk, normalise

CHUNK, SHORT_CHUNK = 128, 16
MAX_CHUNKS = 32  # at once: the states of S chunks are found by products with [S, S] weights


def safe_range(dtype: torch.dtype) -> float:
    """Return how far logits may lie apart: what underflows beside the largest is then below the rounding of a sum."""
    info = torch.finfo(dtype)
    return -math.log(info.tiny) + math.log(info.eps) - 2 * math.log(CHUNK)


def chunk_size(length: int) -> int:
    """Return C, a power of 2, for a sequence of some tokens."""
    return min(CHUNK, 1 << (length - 1).bit_length())


def spans(start: int, stop: int, size: int, groups: int, rows: int, device: torch.device) -> Iterator[slice]:
    """Yield the tokens of the chunks of some size that are computed at once, in order; ``rows`` are kept per token."""
    for tokens in chunks(stop - start, groups, rows, device, size, MAX_CHUNKS):
        yield slice(start + tokens.start, start + tokens.stop)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: KeyMap,
    mask: Tensor | None,
    out: Tensor,
    start: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write the attention into out [B, H, g, N, e] and return the log-normalisers L [G, N, 1].

    ``start`` is the state of keys before all others, lse [B * H, m, 1] and mean [B * H, m, e].
    """
    scan = _Scan(q, k, v, keys, mask)
    normaliser = scan.full(q.shape[3], 1)
    state = scan.first_state(start)
    for part in scan.parts():
        tau, kappa, values = scan.queries(part), scan.key_logits(part), scan.padded(v, part)
        lse, mean, state = _earlier(kappa, values, state)
        result, L = (_attend_pairwise if part.pairwise else _attend)(tau, kappa, values, lse, mean)
        normaliser[:, part.tokens] = scan.flat(L, part)
        out[..., part.tokens, :] = scan.flat(result, part).view(*out.shape[:3], -1, out.shape[-1])
    return normaliser


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: KeyMap,
    mask: Tensor | None,
    out: Tensor,
    normaliser: Tensor,
    grad: Tensor,
    start: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return the gradients of q, k, v and the state before, if there is one, in the dtype of the features.

    ``keys`` adds up those of rows and weights.
    """
    scan = _Scan(q, k, v, keys, mask)
    normaliser = normaliser.masked_fill(normaliser == -torch.inf, torch.inf)  # weights 0 where no key is seen
    grad_q, grad_k, grad_v = (t.new_zeros(t.shape, dtype=scan.dtype) for t in (q, k, v))

    starts, state, last = [], scan.first_state(start), None
    for part in scan.parts():
        if last is not None:
            *_, state = _earlier(scan.key_logits(last), scan.padded(v, last), state)
        starts.append((part.tokens, part.pairwise, state))
        last = part

    largest = scan.full(1, keys.num_features, value=-torch.inf)  # of tau_ij - L_i over later queries
    sums = scan.full(keys.num_features, v.shape[-1] + 1)  # of their gradients, and of the means of these
    for tokens, pairwise, state in reversed(starts):
        part = last if tokens == last.tokens else scan.part(tokens, pairwise)
        tau, kappa, values = scan.queries(part), scan.key_logits(part), scan.padded(v, part)
        L, g = scan.in_chunks(normaliser[:, tokens], part, torch.inf), scan.padded(grad, part)
        average = (g * scan.padded(out, part)).sum(-1, keepdim=True)  # of what each query receives
        lse, mean, _ = _earlier(kappa, values, state)
        attend_backward = _attend_pairwise_backward if pairwise else _attend_backward
        grad_tau, grad_kappa, grad_values = attend_backward(tau, kappa, values, lse, mean, L, g, average)
        grad_q[..., tokens, :] = scan.query_backward(grad_tau, part)
        later, later_sums, (largest, sums) = _later(tau.sub_(L), torch.cat([g, average], -1), largest, sums)
        weights = (kappa + later).exp_()
        gradient, average = later_sums[..., :-1], later_sums[..., -1:]
        grad_kappa.addcmul_(weights, (values @ gradient.mT).sub_(average.mT))
        grad_values += weights @ gradient
        grad_k[:, :, tokens], grad_v[:, :, tokens] = scan.key_backward(grad_kappa, grad_values, part)
    if start is None:
        return grad_q, grad_k, grad_v, None
    lse, mean = starts[0][-1]
    weight, average_gradient = (lse.mT + largest).exp().mT, sums[..., -1:]  # [G, m, 1]
    of_start = weight * ((mean * sums[..., :-1]).sum(-1, keepdim=True) - average_gradient), weight * sums[..., :-1]
    return grad_q, grad_k, grad_v, tuple(t.unflatten(0, (-1, scan.group)).sum(1) for t in of_start)


def _factors(tau: Tensor, kappa: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tau + b, exp(kappa - b) and the weight exp(lse - b) of the state [G, S, m, 1]."""
    b = finite(torch.maximum(lse.mT, kappa.amax(-2, keepdim=True)))  # [G, S, 1, m]
    return tau + b, (kappa - b).exp_(), (lse - b.mT).exp_()


def _attend(tau: Tensor, kappa: Tensor, values: Tensor, lse: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention [G, S, C, e] and L [G, S, C, 1]."""
    tau, of_key, of_state = _factors(tau, kappa, lse)
    largest = tau.amax(-1, keepdim=True)
    of_query = (tau - largest).exp_()
    weights = (of_query @ of_key.mT).tril_()  # [G, S, C, C]
    total = weights.sum(-1, keepdim=True) + of_query @ of_state
    result = (weights @ values + of_query @ (of_state * mean)) / total.masked_fill(total == 0, 1.0)
    return result, largest + total.log()


def _attend_backward(
    tau: Tensor, kappa: Tensor, values: Tensor, lse: Tensor, mean: Tensor, L: Tensor, g: Tensor, average: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of tau and, from queries of the same chunk, of kappa and values."""
    tau, of_key, of_state = _factors(tau, kappa, lse)
    of_query = (tau - L).exp_()  # times of_key: the weight
    weights = (of_query @ of_key.mT).tril_()
    grad_pairs = (g @ values.mT).sub_(average).tril_()
    grad_tau = of_query * (grad_pairs @ of_key + of_state.mT * (g @ mean.mT - average))
    return grad_tau, of_key * (grad_pairs.mT @ of_query), weights.mT @ g


def _attend_pairwise(tau: Tensor, kappa: Tensor, values: Tensor, lse: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`_attend`, for logits in any range."""
    of_state, state_L = normalise(tau + lse.mT, -1, hidden=True)
    pairs = (tau[..., None, :] + kappa[..., None, :, :]).logsumexp(-1)  # [G, S, C, C]
    pairs = pairs.masked_fill(_hidden(pairs), -torch.inf)
    weights, L = normalise(torch.cat([state_L, pairs], -1), -1, hidden=True)
    return weights[..., :1] * (of_state @ mean) + weights[..., 1:] @ values, L


def _attend_pairwise_backward(
    tau: Tensor, kappa: Tensor, values: Tensor, lse: Tensor, mean: Tensor, L: Tensor, g: Tensor, average: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_attend_backward`, for logits in any range."""
    logits = tau[..., None, :] + kappa[..., None, :, :] - L[..., None]  # [G, S, C, C, m]
    weights = logits.masked_fill_(_hidden(logits[..., 0])[..., None], -torch.inf).exp_()
    grad_pairs = g @ values.mT - average
    of_pairs = weights * grad_pairs[..., None]
    grad_tau = of_pairs.sum(-2) + (tau + lse.mT - L).exp() * (g @ mean.mT - average)
    return grad_tau, of_pairs.sum(-3), weights.sum(-1).mT @ g


def _hidden(pairs: Tensor) -> Tensor:
    """Return which keys come after which queries [C, C]."""
    return torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).triu(1)


def _earlier(
    kappa: Tensor, values: Tensor, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return lse [G, S, m, 1] and mean [G, S, m, e] of all keys before each chunk, and the state after the last.

    Args:
        kappa: [G, S, C, m].
        values: [G, S, C, e].
        state: lse [G, m, 1] and mean [G, m, e] of the keys before.
    """
    weights, lse = normalise(kappa.mT, -1, hidden=True)
    lse = torch.cat([state[0][:, None], lse], 1)[..., 0].mT[:, :, None]  # [G, m, 1, S + 1]
    mean = torch.cat([state[1][:, None], weights @ values], 1).transpose(1, 2)  # [G, m, S + 1, e]
    size = lse.shape[-1]
    seen = lse.expand(-1, -1, size, -1).masked_fill(_hidden(lse.expand(-1, -1, size, -1)), -torch.inf)
    share, lse = normalise(seen, -1, hidden=True)
    lse, mean = lse.transpose(1, 2), (share @ mean).transpose(1, 2)
    return lse[:, :-1], mean[:, :-1], (lse[:, -1], mean[:, -1])


def _later(
    logits: Tensor, sums: Tensor, largest: Tensor, later_sums: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return what :func:`_earlier` does, of the queries after each chunk and in terms of largest and sums.

    Args:
        logits: tau - L [G, S, C, m].
        sums: What is summed [G, S, C, e + 1].
        largest: Of the logits of the queries after all [G, 1, m].
        later_sums: Of them, relative to ``largest`` [G, m, e + 1].
    """
    own = logits.amax(-2, keepdim=True)  # [G, S, 1, m]
    own_sums = (logits - finite(own)).exp_().mT @ sums
    own = torch.cat([own, largest[:, None]], 1)[:, :, 0].mT[:, :, None]  # [G, m, 1, S + 1]
    own_sums = torch.cat([own_sums, later_sums[:, None]], 1).transpose(1, 2)  # [G, m, S + 1, e + 1]
    size = own.shape[-1]
    seen = own.expand(-1, -1, size, -1).masked_fill(_hidden(own.expand(-1, -1, size, -1)).mT, -torch.inf)
    largest = seen.amax(-1, keepdim=True)
    sums = ((seen - finite(largest)).exp_() @ own_sums).transpose(1, 2)
    largest = largest.transpose(1, 2).mT  # [G, S + 1, 1, m]
    return largest[:, 1:], sums[:, 1:], (largest[:, 0], sums[:, 0])


@dataclass(frozen=True)
class _Part:
    """Neighbouring chunks that are computed at once.

    Args:
        tokens: Which.
        pairwise: Whether each pair needs a logarithm of its own.
        size: C.
        kappa: [B * H, n, m].
        k: [B * H, n, d], shifted.
        scaled: What :meth:`KeyMap.backward` needs.
    """

    tokens: slice
    pairwise: bool
    size: int
    kappa: Tensor
    k: Tensor
    scaled: Tensor


class _Scan:
    """Chunks of queries and keys, padded, every query head with keys of its own."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, keys: KeyMap, mask: Tensor | None) -> None:
        self.q, self.k, self.v, self.key_map, self.mask = q, k, v, keys, mask
        self.heads, self.group, self.length = q.shape[1:4]
        self.groups, self.features, self.dtype = len(keys.rows) * self.group, keys.num_features, keys.dtype

    def parts(self) -> Iterator[_Part]:
        """Yield all tokens in order."""
        device = self.q.device
        for tokens in spans(0, self.length, chunk_size(self.length), self.groups, self.features, device):
            part = self.part(tokens, pairwise=False)
            if self._is_safe(part.kappa):
                yield part
            else:
                pairs = SHORT_CHUNK * self.features
                for piece in spans(tokens.start, tokens.stop, SHORT_CHUNK, self.groups, pairs, device):
                    yield self.part(piece, pairwise=True)

    def part(self, tokens: slice, pairwise: bool) -> _Part:
        """Compute the logits of some keys."""
        k = self.key_map.shifted(group_chunk(self.k, tokens, self.dtype))
        kappa, scaled = self.key_map.logits(k, mask_chunk(self.mask, self.heads, tokens), by_token=True)
        return _Part(tokens, pairwise, SHORT_CHUNK if pairwise else chunk_size(self.length), kappa, k, scaled)

    def full(self, *shape: int, value: float = 0.0) -> Tensor:
        """Return a tensor [G, *shape]."""
        return self.key_map.rows.new_full((self.groups, *shape), value)

    def first_state(self, start: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return lse [G, m, 1] and mean [G, m, e] of the keys before all others."""
        if start is None:
            return self.full(self.features, 1, value=-torch.inf), self.full(self.features, self.v.shape[-1])
        return tuple(map(self.per_query_head, start))

    def in_chunks(self, x: Tensor, part: _Part, value: float = 0.0) -> Tensor:
        """Return x [G, n, .] as [G, S, C, .]."""
        missing = -x.shape[1] % part.size
        return (F.pad(x, (0, 0, 0, missing), value=value) if missing else x).unflatten(1, (-1, part.size))

    def flat(self, x: Tensor, part: _Part) -> Tensor:
        """Return x [G, S, C, .] without padding [G, n, .]."""
        return x.flatten(1, 2)[:, : part.tokens.stop - part.tokens.start]

    def per_query_head(self, x: Tensor) -> Tensor:
        """Return x [B * H, ...] as [G, ...]."""
        return x.repeat_interleave(self.group, 0) if self.group > 1 else x

    def padded(self, x: Tensor, part: _Part) -> Tensor:
        """Return the part of x, [B, H, g, N, .] or of keys [B, H, N, .], as [G, S, C, .]."""
        tokens = x[..., part.tokens, :].to(self.dtype)
        tokens = tokens.reshape(-1, *tokens.shape[-2:])
        return self.in_chunks(tokens if x.dim() == 5 else self.per_query_head(tokens), part)

    def queries(self, part: _Part) -> Tensor:
        """Return tau [G, S, C, m]."""
        q = group_chunk(self.q, part.tokens, self.dtype)  # [B * H, g * n, d]
        tau = q @ self.key_map.feature_rows.mT
        return self.in_chunks(tau.view(self.groups, -1, self.features), part)

    def key_logits(self, part: _Part) -> Tensor:
        """Return kappa [G, S, C, m], -inf in the padding."""
        return self.in_chunks(self.per_query_head(part.kappa), part, -torch.inf)

    def query_backward(self, grad_tau: Tensor, part: _Part) -> Tensor:
        """Return the gradient of the queries [B, H, g, n, d] from that of tau [G, S, C, m]."""
        grad_tau = self.flat(grad_tau, part).reshape(len(self.key_map.rows), -1, self.features)
        grad = self.key_map.query_backward(grad_tau, group_chunk(self.q, part.tokens, self.dtype))
        return grad.view(*self.q.shape[:3], -1, self.q.shape[-1])

    def key_backward(self, grad_kappa: Tensor, grad_values: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values [B, H, n, .] from those of logits and values [G, S, C, .]."""
        grad_kappa, grad_values = (self.flat(t, part) for t in (grad_kappa, grad_values))
        if self.group > 1:
            grad_kappa, grad_values = (t.unflatten(0, (-1, self.group)).sum(1) for t in (grad_kappa, grad_values))
        grad = self.key_map.backward(grad_kappa, part.k, part.scaled, by_token=True)
        return grad.unflatten(0, (-1, self.heads)), grad_values.unflatten(0, (-1, self.heads))

    def _is_safe(self, kappa: Tensor) -> bool:
        smallest = kappa if self.mask is None else kappa.masked_fill(kappa == -torch.inf, torch.inf)
        apart = kappa.amax(1) - smallest.amin(1)  # -inf where no key is seen
        return bool((apart <= safe_range(self.dtype)).all())

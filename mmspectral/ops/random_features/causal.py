r"""Causal attention over random features: a scan over chunks, and halving inside a chunk.

Query i sees the keys n <= i. Keys before its chunk come as a state, which is
the non-causal case. Inside a chunk one maximum per feature would have to be
taken over keys that some queries may not see, and where such a key is far
larger than all that a query does see, every term of that query underflows.
So the chunk is halved: the queries of the second half see all keys of the
first, which is the non-causal case again; the halves are halved in turn, down
to each query with its own key. Results are merged by their log-normalisers

    L_i = log sum_{n <= i} sum_j exp(tau_ij + kappa_nj).

The backward pass gets every weight from L_i alone. Going forward over the
chunks it carries the state of earlier keys for the gradient of the queries;
going back, the sums over later queries, relative to the largest
tau_ij - L_i of each feature, for that of the keys: kappa_nj + tau_ij <= L_i
for every later query, so these exponentials too are at most 1.

Shape legend: G = B * H * g (image, query head) pairs, N tokens, C tokens of a
chunk (a power of 2, the last padded with keys that are not seen), P = C / 2s
pairs of blocks of s tokens; d, e channels of keys and values, m features.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspectral.ops.random_features.chunked import KeyMap, finite, group_chunk, mask_chunk, merge_state, normalise

CHUNK = 128


def forward(q: Tensor, k: Tensor, v: Tensor, keys: KeyMap, mask: Tensor | None, out: Tensor) -> Tensor:
    """Write the attention into out [B, H, g, N, e] and return the log-normalisers L [G, N, 1]."""
    scan = _Scan(q, k, v, keys, mask)
    lse, mean = scan.full(keys.num_features, 1, value=-torch.inf), scan.full(keys.num_features, v.shape[-1])
    normaliser = scan.full(q.shape[3], 1)
    for tokens in scan.chunks():
        tau, kappa, values = scan.queries(tokens), scan.keys(tokens)[0], scan.padded(v, tokens)
        weights, L = normalise(tau + lse.mT, -1, hidden=True)
        L, result = merge_state(L, weights @ mean, (tau + kappa).logsumexp(-1, keepdim=True), values)  # [G, C, .]
        for s in scan.block_sizes():
            (x, y), (t, L2, result2) = _halves(s, kappa, values)[0], _halves(s, tau, L, result)[1]
            of_key, block_lse = normalise(x, -2, hidden=True)  # of each feature over the first block [G, P, s or 1, m]
            of_query, block_L = normalise(t + block_lse, -1, hidden=True)
            merged_L, merged = merge_state(L2, result2, block_L, (of_query @ of_key.mT) @ y)
            L2.copy_(merged_L)
            result2.copy_(merged)
        normaliser[:, tokens] = scan.cropped(L, tokens)
        out[..., tokens, :] = scan.cropped(result, tokens).view(*out.shape[:3], -1, out.shape[-1])
        weights, new_lse = normalise(kappa.mT, -1, hidden=True)
        lse, mean = merge_state(lse, mean, new_lse, weights @ values)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v in the dtype of the features; ``keys`` adds up those of rows and weights."""
    scan = _Scan(q, k, v, keys, mask)
    normaliser = normaliser.masked_fill(normaliser == -torch.inf, torch.inf)  # weights 0 where no key is seen
    grad_q, grad_k, grad_v = (t.new_zeros(t.shape, dtype=scan.dtype) for t in (q, k, v))

    def of_rows(tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return L, the gradient and its mean over what each query sees [G, C, .]."""
        g, o = scan.padded(grad, tokens), scan.padded(out, tokens)
        return scan.pad(normaliser[:, tokens], torch.inf), g, (g * o).sum(-1, keepdim=True)

    lse, mean = scan.full(keys.num_features, 1, value=-torch.inf), scan.full(keys.num_features, v.shape[-1])
    for tokens in scan.chunks():  # forward: what queries receive from earlier keys, and all within the chunk
        tau, (kappa, k_chunk, scaled), values = scan.queries(tokens), scan.keys(tokens), scan.padded(v, tokens)
        L, g, average = of_rows(tokens)
        grad_tau = (tau + lse.mT - L).exp() * (g @ mean.mT - average)
        own = (tau + kappa - L).exp()
        grad_kappa = own * ((g * values).sum(-1, keepdim=True) - average)
        grad_tau += grad_kappa
        grad_values = own.sum(-1, keepdim=True) * g
        for s in scan.block_sizes():
            x, y, grad_x, grad_y = _halves(s, kappa, values, grad_kappa, grad_values)[0]
            t, L2, g2, average2, grad_t = _halves(s, tau, L, g, average, grad_tau)[1]
            of_key, block_lse = normalise(x, -2, hidden=True)
            of_query = (t + block_lse - L2).exp()  # times of_key: the weight
            grad_pairs = g2 @ y.mT - average2  # [G, P, s, s]
            grad_t += of_query * (grad_pairs @ of_key)
            grad_x += of_key * (grad_pairs.mT @ of_query)
            grad_y += (of_query @ of_key.mT).mT @ g2
        grad_q[..., tokens, :] = scan.query_backward(grad_tau, tokens)
        scan.add_key_gradients(grad_kappa, grad_values, k_chunk, scaled, tokens, grad_k, grad_v)
        weights, new_lse = normalise(kappa.mT, -1, hidden=True)
        lse, mean = merge_state(lse, mean, new_lse, weights @ values)

    largest = scan.full(1, keys.num_features, value=-torch.inf)  # of tau_ij - L_i over later queries
    gradient, average_gradient = scan.full(keys.num_features, v.shape[-1]), scan.full(keys.num_features, 1)
    for tokens in reversed(scan.chunks()):  # backward: what keys receive from later queries
        (kappa, k_chunk, scaled), values = scan.keys(tokens), scan.padded(v, tokens)
        weights = (kappa + largest).exp()
        grad_kappa = weights * (values @ gradient.mT - average_gradient.mT)
        scan.add_key_gradients(grad_kappa, weights @ gradient, k_chunk, scaled, tokens, grad_k, grad_v)
        L, g, average = of_rows(tokens)
        logits = scan.queries(tokens) - L
        previous, largest = largest, torch.maximum(largest, logits.amax(-2, keepdim=True))
        decay, weights = ((x - finite(largest)).exp().mT for x in (previous, logits))
        gradient = gradient * decay + weights @ g
        average_gradient = average_gradient * decay + weights @ average
    return grad_q, grad_k, grad_v


def _halves(s: int, *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of the first and of the second halves [G, P, s, .] of blocks of 2s tokens of each [G, C, .]."""
    blocks = [t.view(t.shape[0], -1, 2, s, t.shape[-1]) for t in tensors]
    return [t[:, :, 0] for t in blocks], [t[:, :, 1] for t in blocks]


class _Scan:
    """Chunks of queries and keys, padded to a power of 2 tokens, every query head with keys of its own."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, keys: KeyMap, mask: Tensor | None) -> None:
        self.q, self.k, self.v, self.key_map, self.mask = q, k, v, keys, mask
        self.heads, self.group, self.length = q.shape[1:4]
        self.dtype = keys.dtype
        self.size = min(CHUNK, 1 << (self.length - 1).bit_length())  # C

    def chunks(self) -> Sequence[slice]:
        """Return the chunks in order."""
        starts = range(0, self.length, self.size)
        return [slice(start, min(start + self.size, self.length)) for start in starts]

    def block_sizes(self) -> Iterator[int]:
        """Yield s = 1, 2, 4 .. C / 2."""
        return (1 << i for i in range(self.size.bit_length() - 1))

    def full(self, *shape: int, value: float = 0.0) -> Tensor:
        """Return a tensor [G, *shape]."""
        return self.key_map.rows.new_full((len(self.key_map.rows) * self.group, *shape), value)

    def pad(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Return x [G, n, .] as [G, C, .]."""
        return F.pad(x, (0, 0, 0, self.size - x.shape[1]), value=value)

    def cropped(self, x: Tensor, tokens: slice) -> Tensor:
        """Return x [G, C, .] without padding [G, n, .]."""
        return x[:, : tokens.stop - tokens.start]

    def per_query_head(self, x: Tensor) -> Tensor:
        """Return x [B * H, ...] as [G, ...]."""
        return x.repeat_interleave(self.group, 0) if self.group > 1 else x

    def padded(self, x: Tensor, tokens: slice) -> Tensor:
        """Return a chunk of x, [B, H, g, N, .] or of keys [B, H, N, .], as [G, C, .]."""
        chunk = x[..., tokens, :].to(self.dtype)
        chunk = chunk.reshape(-1, *chunk.shape[-2:])
        return self.pad(chunk if x.dim() == 5 else self.per_query_head(chunk))

    def queries(self, tokens: slice) -> Tensor:
        """Return tau [G, C, m]."""
        return self.padded(self.q, tokens) @ self.per_query_head(self.key_map.feature_rows).mT

    def keys(self, tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return kappa [G, C, m], -inf in the padding, and what :meth:`KeyMap.backward` needs."""
        k = self.key_map.shifted(group_chunk(self.k, tokens, self.dtype))
        kappa, scaled = self.key_map.logits(k, mask_chunk(self.mask, self.heads, tokens))
        return self.pad(self.per_query_head(kappa).mT, -torch.inf).contiguous(), k, scaled

    def query_backward(self, grad_tau: Tensor, tokens: slice) -> Tensor:
        """Return the gradient of a chunk of queries [B, H, g, n, d] from that of tau [G, C, m]."""
        grad_tau = self.cropped(grad_tau, tokens).reshape(len(self.key_map.rows), -1, grad_tau.shape[-1])
        grad = self.key_map.query_backward(grad_tau, group_chunk(self.q, tokens, self.dtype))
        return grad.view(*self.q.shape[:3], -1, self.q.shape[-1])

    def add_key_gradients(
        self,
        grad_kappa: Tensor,
        grad_values: Tensor,
        k: Tensor,
        scaled: Tensor,
        tokens: slice,
        grad_k: Tensor,
        grad_v: Tensor,
    ) -> None:
        """Add the gradients of a chunk's logits and values [G, C, .] to those of k and v."""
        grad_kappa, grad_values = (
            self.cropped(t, tokens).unflatten(0, (-1, self.group)).sum(1) for t in (grad_kappa, grad_values)
        )  # [B * H, n, .]
        grad = self.key_map.backward(grad_kappa.mT.contiguous(), k, scaled)
        grad_k[:, :, tokens] += grad.view_as(grad_k[:, :, tokens])
        grad_v[:, :, tokens] += grad_values.view_as(grad_v[:, :, tokens])

"""What attention over random features is compared with: exact softmax, uniform and constant random attention.

Shape legend: B batch, h query heads, H key heads, N queries, L keys, d and e
channels of keys and values.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspectral.ops.precision import at_least_float32
from mmspectral.ops.random_features.features import draw_projection, fold_features
from mmspectral.ops.random_features.op import check_mask, linear_attention

CODE_BLOCK = 1024


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return exact attention softmax(scale q k^T) v by torch's scaled_dot_product_attention.

    Args:
        q: [B, h, N, d].
        k: [B, H, L, d].
        v: [B, H, L, e].
        mask: [B, L], bool, True for keys that may be seen.
        causal: Query i sees keys 0 .. i only.
        scale: Default d^(-1/2).

    Returns:
        [B, h, N, e].
    """
    check_mask(mask, k)
    allowed = None if mask is None else mask[:, None, None, :]
    if mask is not None and causal:  # torch takes one of the two
        allowed = allowed & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(
        q, k, v, allowed, is_causal=causal and mask is None, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
    )


def uniform_attention(v: Tensor, num_queries: int, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the mean of the values that each query may see: a control that ignores queries and keys.

    Args:
        v: [B, h, L, e].
        num_queries: N.
        mask: [B, L], bool, True for keys that may be seen. Who sees none gets 0.
        causal: Query i sees keys 0 .. i only.

    Returns:
        [B, h, N, e] in the dtype of v.
    """
    check_mask(mask, v)
    values = at_least_float32(v)
    seen = values.new_ones(v.shape[0], 1, v.shape[2], 1) if mask is None else mask[:, None, :, None].to(values)
    total, count = values * seen, seen
    total, count = (t.cumsum(2) if causal else t.sum(2, keepdim=True) for t in (total, count))
    return (total / count.clamp(min=1)).to(v.dtype).expand(-1, -1, num_queries, -1)


def constant_attention(
    v: Tensor,
    num_queries: int,
    num_features: int,
    dim: int,
    seed: int,
    layer: int = 0,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return linear attention between random codes of the positions: weights that are random and ignore the content.

    This is how the random / constant baseline of arXiv 2603.04127 is read here;
    its definition could not be had.

    Args:
        v: [B, h, L, e].
        num_queries: N.
        num_features: m.
        dim: d of the codes, all N(0, I).
        seed: Of the run, as for :func:`~mmspectral.ops.random_features.features.draw_projection`; so the next.
        layer: Index of the layer.
        mask: [B, L], bool, True for keys that may be seen.
        causal: Query i sees keys 0 .. i only.

    Returns:
        [B, h, N, e] in the dtype of v.
    """
    w = draw_projection(num_features, dim, seed, layer).to(v.device)
    q, k = (
        position_codes(n, dim, seed, layer).to(v.device).expand(*v.shape[:2], n, dim) for n in (num_queries, v.shape[2])
    )
    return linear_attention(q, k, v, fold_features(w, None, dim, orthogonal=True), mask, causal)


@torch.library.custom_op("mmspectral::position_codes", mutates_args=())  # which torch.compile need not look into
def position_codes(length: int, dim: int, seed: int, layer: int = 0) -> Tensor:
    """Return codes ~ N(0, I) of positions 0 .. length - 1, the same whatever the length, [length, dim] float32."""
    return torch.cat([_codes(dim, seed, layer, block) for block in range(-(-length // CODE_BLOCK))])[:length].clone()


@position_codes.register_fake
def _(length, dim, seed, layer=0):
    return torch.empty(length, dim, device="cpu")


@functools.lru_cache(maxsize=64)
def _codes(dim: int, seed: int, layer: int, block: int) -> Tensor:
    return draw_projection(CODE_BLOCK, dim, seed, layer, counter=1 + block, orthogonal=False)

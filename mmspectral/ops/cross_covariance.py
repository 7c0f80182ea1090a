"""Cross-covariance attention of XCiT (arXiv 2106.09681, section 3.2).

Shape legend: B images, h heads, d channels per head, N tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspectral.ops.precision import at_least_float32, without_autocast


def cross_covariance_attention(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, attn_drop: float = 0.0) -> Tensor:
    """Attend among channels: softmax(q^ k^T * temperature) v with q^, k^ of unit length over the tokens.

    Norms and softmax run in float32 (float64 for float64 input) whatever
    autocast says: sums of squares of half-precision activations overflow.

    Args:
        q: Queries [B, h, d, N].
        k: Keys [B, h, d, N].
        v: Values [B, h, d, N].
        temperature: One factor per head [h, 1, 1].
        attn_drop: Dropout probability on the attention matrix.

    Returns:
        [B, h, d, N] in the dtype of ``v``.
    """
    attn = cross_covariance_logits(q, k, temperature).softmax(dim=-1)  # [B, h, d, d]
    attn = F.dropout(attn, attn_drop)
    with without_autocast(q.device):
        return attn.to(v.dtype) @ v


def cross_covariance_logits(q: Tensor, k: Tensor, temperature: Tensor) -> Tensor:
    """Return q^ k^T * temperature [B, h, d, d] in float32 (float64 for float64 input); arguments as above."""
    with without_autocast(q.device):
        cosines = _unit_length(q) @ _unit_length(k).transpose(-2, -1)  # in -1 .. 1, for which half precision will do
        return at_least_float32(cosines) * at_least_float32(temperature)


def _unit_length(x: Tensor) -> Tensor:
    """Divide [B, h, d, N] by the norm over tokens, in the dtype of ``x``."""
    if x.dtype.itemsize >= 4:
        return F.normalize(x, dim=-1)
    # With the 1e-12 of F.normalize the gradient of a channel of zeros is no float16 number.
    smallest = max(1e-12, torch.finfo(x.dtype).tiny)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).clamp_min(smallest)
    return x * norm.reciprocal().to(x.dtype)

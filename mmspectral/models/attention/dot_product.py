"""Dot-product attention of ViT and DeiT, drop-in for mmpretrain's, with conditioned q, k and v."""

from functools import partial

import torch.nn.functional as F
from mmpretrain.models.utils import MultiheadAttention
from torch import Tensor

from mmspectral.models.attention.adopt import ConditionedAttention
from mmspectral.ops.precision import at_least_float32, without_autocast
from mmspectral.registry import MODELS


@MODELS.register_module()
class SpectralMultiheadAttention(ConditionedAttention, MultiheadAttention):
    """mmpretrain's ``MultiheadAttention`` with spectral conditioning of q, k and v.

    The forward is mmpretrain's, on torch's ``scaled_dot_product_attention``; with
    ``conditioning=None`` the outputs are bit-equal. One difference: ``qk_scale``
    multiplies the logits, where mmpretrain ignores its value and multiplies
    them by sqrt(d).

    Args:
        embed_dims: Channels D.
        num_heads: Heads h.
        qk_scale: Factor of the logits; None is d^(-1/2).
        **kwargs: mmpretrain's other arguments, and ``conditioning``.
    """

    def __init__(self, embed_dims: int, num_heads: int, *, qk_scale: float | None = None, **kwargs) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        if qk_scale is not None:
            self.scaled_dot_product_attention = partial(F.scaled_dot_product_attention, scale=qk_scale)

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        attention = self.scaled_dot_product_attention
        if not isinstance(attention, partial):
            return self.head_dims**-0.5
        scale = attention.keywords["scale"]
        # mmpretrain's own attention, which an adopted layer may have, divides by it.
        return scale if attention.func is F.scaled_dot_product_attention else 1 / scale

    def attention_logits(self, x: Tensor) -> Tensor:
        """Return the attention logits [B, h, N, N] in float32 or better, for tokens [B, N, D]."""
        q, k, _ = self._project(x)
        with without_autocast(q.device):
            return self.scale * at_least_float32(q) @ at_least_float32(k).mT

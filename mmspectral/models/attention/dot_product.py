"""Dot-product attention of ViT and DeiT, drop-in for mmpretrain's, with conditioned q, k and v."""

from functools import partial

import torch
import torch.nn.functional as F
from mmpretrain.models.utils import MultiheadAttention
from torch import Tensor

from mmspectral.models.fused_projection import condition_fused_projection
from mmspectral.ops.precision import at_least_float32, without_autocast
from mmspectral.registry import MODELS


@MODELS.register_module()
class SpectralMultiheadAttention(MultiheadAttention):
    """mmpretrain's ``MultiheadAttention`` with spectral conditioning of q, k and v.

    The forward is mmpretrain's, on torch's ``scaled_dot_product_attention``; with
    ``conditioning=None`` the outputs are bit-equal. One difference: ``qk_scale``
    multiplies the logits, where mmpretrain ignores its value and multiplies
    them by sqrt(d).

    Args:
        embed_dims: Channels D.
        num_heads: Heads h.
        conditioning: None, or a dict for :func:`mmspectral.layers.build_conditioning`.
        qk_scale: Factor of the logits; None is d^(-1/2).
        **kwargs: mmpretrain's other arguments.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        conditioning: dict | None = None,
        qk_scale: float | None = None,
        **kwargs,
    ) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        self.scale = self.head_dims**-0.5 if qk_scale is None else qk_scale
        if qk_scale is not None:
            self.scaled_dot_product_attention = partial(F.scaled_dot_product_attention, scale=qk_scale)
        condition_fused_projection(self, conditioning)

    @classmethod
    def from_stock(cls, stock: MultiheadAttention, conditioning: dict | None) -> "SpectralMultiheadAttention":
        """Return a conditioned layer that shares the parameters of a stock one."""
        attention = stock.scaled_dot_product_attention
        with torch.device("meta"):  # the parameters come from ``stock``: draw no random numbers
            layer = cls(
                stock.embed_dims,
                stock.num_heads,
                input_dims=stock.input_dims,
                attn_drop=stock.attn_drop,
                qk_scale=1 / attention.keywords["scale"] if isinstance(attention, partial) else None,
                v_shortcut=stock.v_shortcut,
                init_cfg=stock.init_cfg,
            )
        for name, child in stock.named_children():
            setattr(layer, name, child)
        condition_fused_projection(layer, conditioning)
        return layer.train(stock.training)

    def attention_logits(self, x: Tensor) -> Tensor:
        """Return what the softmax is taken of, [B, h, N, N] in float32 or better, for tokens [B, N, D]."""
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dims)
        q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, d]
        with without_autocast(q.device):
            return self.scale * at_least_float32(q) @ at_least_float32(k).mT

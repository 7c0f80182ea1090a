"""Layers of DaViT (arXiv 2204.03645) beside channel attention: windows without position bias, downsampling."""

import torch
from mmpretrain.models.backbones.davit import DaViTDownSample, DaViTWindowMSA
from torch import Tensor, nn

from mmspectral.models.attention.window import WindowAttention
from mmspectral.models.fused_projection import condition_fused_projection


class SpectralDaViTWindowMSA(WindowAttention, DaViTWindowMSA):
    """Attention within windows, without position bias, with conditioning of q, k and v.

    With ``conditioning=None`` the outputs are bit-equal to mmpretrain's
    ``DaViTWindowMSA`` in float32.
    """

    @classmethod
    def from_stock(cls, stock: DaViTWindowMSA, conditioning: dict | None) -> "SpectralDaViTWindowMSA":
        """Return a conditioned layer that shares the parameters of a stock one."""
        with torch.device("meta"):  # the parameters come from ``stock``: draw no random numbers
            layer = cls(
                stock.embed_dims,
                stock.window_size,
                stock.num_heads,
                qk_scale=stock.scale,
                attn_drop=stock.attn_drop.p,
                proj_drop=stock.proj_drop.p,
                init_cfg=stock.init_cfg,
            )
        layer.qkv, layer.proj = stock.qkv, stock.proj
        condition_fused_projection(layer, conditioning)
        return layer.train(stock.training)


class AnySizeDownSample(DaViTDownSample):
    """mmpretrain's downsampling, with the padding applied to the map instead of the token sequence."""

    @classmethod
    def from_stock(cls, stock: DaViTDownSample) -> "AnySizeDownSample":
        """Return a layer that shares the parameters of a stock one."""
        with torch.device("meta"):
            layer = cls(stock.projection.in_channels, stock.out_channels, init_cfg=stock.init_cfg)
        layer.norm, layer.projection = stock.norm, stock.projection
        layer.adaptive_padding = stock.adaptive_padding or nn.Identity()
        return layer

    def forward(self, x: Tensor, input_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Map tokens [B, H * W, C] of a map H x W to those of a map ceil(H / 2) x ceil(W / 2), and its size."""
        x = self.norm(x).unflatten(1, input_size).permute(0, 3, 1, 2).contiguous()  # [B, C, H, W]
        x = self.projection(self.adaptive_padding(x))
        return x.flatten(2).transpose(1, 2), tuple(x.shape[-2:])

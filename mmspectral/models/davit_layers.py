"""Layers of DaViT (arXiv 2204.03645) beside channel attention: windows without position bias, downsampling."""

import torch
from mmpretrain.models.backbones.davit import DaViTDownSample, DaViTWindowMSA
from torch import Tensor, nn

from mmspectral.layers import build_conditioning, condition_linear


class SpectralDaViTWindowMSA(DaViTWindowMSA):
    """Attention within windows, without position bias, with conditioning of q, k and v.

    With ``conditioning=None`` the outputs are bit-equal to mmpretrain's
    ``DaViTWindowMSA`` in float32; in half precision logits and softmax stay in
    float32. Shapes: W windows, N tokens in each, h heads, d channels per head.
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
        condition_linear(
            layer, "qkv", build_conditioning(conditioning), ("q", "k", "v"), layer.num_heads, row_order="[3][heads][d]"
        )
        return layer.train(stock.training)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map the tokens of windows [W, N, D] to [W, N, D].

        Args:
            x: Windows of one image after those of another.
            mask: Added to the logits, [windows of one image, N, N], 0 or negative.
        """
        q, k, v = self._project(x)
        attn = self.attn_drop(self._logits(q, k, mask).softmax(dim=-1))  # [W, h, N, N]
        with torch.autocast(x.device.type, enabled=False):
            x = (attn.to(v.dtype) @ v).transpose(1, 2).reshape(x.shape)
        return self.proj_drop(self.proj(x))

    def attention_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what the softmax is taken of, [W, h, N, N]; arguments as above."""
        q, k, _ = self._project(x)
        return self._logits(q, k, mask)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        W, N, D = x.shape
        qkv = self.qkv(x).reshape(W, N, 3, self.num_heads, D // self.num_heads)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [W, h, N, d]

    def _logits(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        if q.dtype.itemsize < 4:
            q, k = q.float(), k.float()
        with torch.autocast(q.device.type, enabled=False):
            logits = (q * self.scale) @ k.transpose(-2, -1)  # [W, h, N, N]
        if mask is not None:
            logits = (logits.unflatten(0, (-1, len(mask))) + mask.unsqueeze(1)).flatten(0, 1)
        return logits


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

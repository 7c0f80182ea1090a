"""Attention of ViT, DeiT and Swin whose softmax is replaced by a kernel of linear cost."""

import torch
from mmpretrain.models.utils import ShiftWindowMSA
from torch import Tensor, nn

from mmspectral.layers import build_kernel
from mmspectral.models.attention.dot_product import SpectralMultiheadAttention
from mmspectral.registry import MODELS


@MODELS.register_module()
class DarkMultiheadAttention(SpectralMultiheadAttention):
    """mmpretrain's ``MultiheadAttention`` over random features (DARK, arXiv 2603.04127), and with conditioning.

    Parameters are those of :class:`SpectralMultiheadAttention` and of
    ``kernel`` (``M``, the draws ``w`` and their counter). With ``kernel=None`` there
    are no others, and outputs are those of :class:`SpectralMultiheadAttention`.

    Args:
        embed_dims: Channels D.
        num_heads: Heads h.
        kernel: None for exact softmax, or a dict for :func:`mmspectral.layers.build_kernel`.
        layer: Index of the layer in its model, which its draws depend on.
        **kwargs: As in :class:`SpectralMultiheadAttention`.

    Raises:
        ValueError: ``attn_drop`` with a kernel: no attention matrix is there to drop from.
    """

    def __init__(
        self, embed_dims: int, num_heads: int, *, kernel: dict | None = None, layer: int = 0, **kwargs
    ) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        self.set_kernel(kernel, layer)

    def set_kernel(self, cfg: dict | None, layer: int) -> None:
        """Replace softmax by a kernel, or leave it for None; arguments as in the constructor."""
        self.kernel = None
        if cfg is None:
            return
        if self.attn_drop:
            raise ValueError(
                f"dropout of attention at rate {self.attn_drop} needs an attention matrix, which a kernel never makes; "
                "set attn_drop_rate (Swin: attn_drop) to 0, and drop_rate or drop_path_rate instead."
            )
        self.kernel = build_kernel(cfg, self.num_heads, self.head_dims, layer, self.scale)
        self.scaled_dot_product_attention = self._attend  # what mmpretrain's forward calls

    def attention_logits(self, x: Tensor) -> Tensor:
        """Return logits whose softmax the attention is, [B, h, N, N], for tokens [B, N, D]; of quadratic cost."""
        if self.kernel is None:
            return super().attention_logits(x)
        q, k, _ = self._project(x)
        return self.kernel.logits(q, k)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        return self.kernel(q, k, v)


class DarkMapAttention(nn.Module):
    """Attention over a whole map in the place of Swin's shifted windows, under the same names of qkv and proj.

    Args:
        stock: Whose projections it takes over; its position bias is left behind.
    """

    def __init__(self, stock: ShiftWindowMSA) -> None:
        super().__init__()
        windows = stock.w_msa
        with torch.device("meta"):  # the parameters are those of the windows: draw no random numbers
            self.w_msa = DarkMultiheadAttention(
                windows.embed_dims,
                windows.num_heads,
                attn_drop=windows.attn_drop.p,
                proj_drop=windows.proj_drop.p,
                qk_scale=windows.scale,
                init_cfg=windows.init_cfg,
            )
        self.w_msa.qkv, self.w_msa.proj = windows.qkv, windows.proj
        self.drop = stock.drop
        self.train(stock.training)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Map tokens [B, H * W, D] of a map H x W to [B, H * W, D]."""
        return self.drop(self.w_msa(x))

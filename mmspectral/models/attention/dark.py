"""Attention of ViT, DeiT and Swin whose softmax is replaced by a kernel of linear cost."""

import torch
from mmpretrain.models.utils import MultiheadAttention, ShiftWindowMSA
from torch import Tensor, nn

from mmspectral.layers.kernels import build_kernel
from mmspectral.models.attention.dot_product import SpectralMultiheadAttention
from mmspectral.models.fused_projection import condition_fused_projection
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
        self.kernel = None
        self._set_kernel(kernel, layer)

    @classmethod
    def from_stock(
        cls, stock: MultiheadAttention, conditioning: dict | None, kernel: dict | None = None, layer: int = 0
    ) -> "DarkMultiheadAttention":
        """Return a layer with conditioning and kernel that shares the parameters of a stock one."""
        attention = super().from_stock(stock, conditioning)
        attention._set_kernel(kernel, layer)
        return attention

    def attention_logits(self, x: Tensor) -> Tensor:
        """Return logits whose softmax the attention is, [B, h, N, N], for tokens [B, N, D]; of quadratic cost."""
        if self.kernel is None:
            return super().attention_logits(x)
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dims)
        q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, d]
        return self.kernel.logits(q, k)

    def _set_kernel(self, kernel: dict | None, layer: int) -> None:
        if kernel is None:
            return
        self.kernel = build_kernel(kernel, self.num_heads, self.head_dims, layer, self.scale)
        if self.attn_drop:
            raise ValueError(
                f"dropout of attention at rate {self.attn_drop} needs an attention matrix, which a kernel never makes; "
                "set attn_drop_rate (Swin: attn_drop) to 0, and drop_rate or drop_path_rate instead."
            )
        self.scaled_dot_product_attention = self._attend  # what mmpretrain's forward calls

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        return self.kernel(q, k, v)


class DarkMapAttention(nn.Module):
    """Attention over a whole map in the place of Swin's shifted windows, under the same names of qkv and proj."""

    def __init__(self, w_msa: DarkMultiheadAttention, drop: nn.Module) -> None:
        super().__init__()
        self.w_msa = w_msa
        self.drop = drop

    @classmethod
    def from_stock(
        cls, stock: ShiftWindowMSA, conditioning: dict | None, kernel: dict | None = None, layer: int = 0
    ) -> "DarkMapAttention":
        """Return a layer that shares the projections of a stock one; its position bias is left behind."""
        windows = stock.w_msa
        with torch.device("meta"):  # the parameters come from ``stock``: draw no random numbers
            w_msa = DarkMultiheadAttention(
                windows.embed_dims,
                windows.num_heads,
                attn_drop=windows.attn_drop.p,
                proj_drop=windows.proj_drop.p,
                qk_scale=windows.scale,
                init_cfg=windows.init_cfg,
            )
        w_msa.qkv, w_msa.proj = windows.qkv, windows.proj
        condition_fused_projection(w_msa, conditioning)
        w_msa._set_kernel(kernel, layer)
        return cls(w_msa, stock.drop).train(stock.training)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Map tokens [B, H * W, D] of a map H x W to [B, H * W, D]."""
        return self.drop(self.w_msa(x))

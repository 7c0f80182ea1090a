"""Window attention of Swin and DaViT, drop-in for mmpretrain's: same forward, same parameter names.

Shape legend: W windows of all images, N = Wh * Ww tokens in a window, D channels, h heads, d = D / h.
"""

import torch.nn.functional as F
from mmpretrain.models.backbones.davit import DaViTWindowMSA
from mmpretrain.models.utils import ShiftWindowMSA, WindowMSA
from torch import Tensor

from mmspectral.models.attention.adopt import ConditionedAttention
from mmspectral.ops.precision import at_least_float32, without_autocast
from mmspectral.registry import MODELS


class WindowAttention(ConditionedAttention):
    """Forward of attention within windows; put it before a class of mmpretrain with its parameters.

    Logits and softmax stay in float32 in half precision, since conditioned logits
    reach the hundreds.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map the tokens of windows [W, N, D] to [W, N, D].

        Args:
            x: Windows of one image after those of another.
            mask: Added to the logits, [windows of one image, N, N], 0 or negative.
        """
        attended = self._attend(*self._project(x), mask)  # [W, h, N, d]
        return self.proj_drop(self.proj(attended.transpose(1, 2).reshape(x.shape)))

    def attention_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention logits [W, h, N, N], with scale, bias and mask; arguments as above."""
        q, k, _ = self._project(x)
        return self._logits(q, k, mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        attn = self.attn_drop(self.softmax(self._logits(q, k, mask)))  # [W, h, N, N]
        with without_autocast(v.device):
            return attn.to(v.dtype) @ v

    def _logits(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        with without_autocast(q.device):
            q, k = at_least_float32(q), at_least_float32(k)
            logits = (q * self.scale) @ k.transpose(-2, -1)  # [W, h, N, N]
            bias = self._position_bias()
            if bias is not None:
                logits = logits + bias.unsqueeze(0)
            if mask is not None:
                logits = logits.unflatten(0, (-1, mask.shape[0])) + mask.unsqueeze(1)
                logits = logits.flatten(0, 1)
            return logits

    def _position_bias(self) -> Tensor | None:
        """Return what is added to the logits of every window, [h, N, N]."""
        return None


@MODELS.register_module()
class SpectralWindowMSA(WindowAttention, WindowMSA):
    """Attention within windows, with relative position bias and spectral conditioning of q, k and v.

    With ``conditioning=None`` the outputs are bit-equal to mmpretrain's
    ``WindowMSA`` in float32. Stock code takes the class as
    ``ShiftWindowMSA(..., window_msa=SpectralWindowMSA, conditioning=...)``.

    Arguments are those of ``WindowMSA``, and ``conditioning`` by name.
    """

    def _position_bias(self) -> Tensor:
        N = self.relative_position_index.shape[0]
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]  # [N * N, h]
        return bias.view(N, N, -1).permute(2, 0, 1).contiguous()  # [h, N, N]


class SpectralDaViTWindowMSA(WindowAttention, DaViTWindowMSA):
    """Attention within windows, without position bias, with conditioning of q, k and v.

    With ``conditioning=None`` the outputs are bit-equal to mmpretrain's
    ``DaViTWindowMSA`` in float32. In half precision torch's fused attention, which
    has logits in float32 without storing them, takes the place of the products.
    """

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.dtype.itemsize >= 4 or mask is not None:  # DaViT itself gives none
            return super()._attend(q, k, v, mask)
        dropout = self.attn_drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scale)


class AnySizeShiftWindowMSA(ShiftWindowMSA):
    """mmpretrain's shifted windows, which also take maps smaller than a window.

    There ``pad_small_map=False`` stops at an assertion. Here such a map is
    padded with zeros to the window and treated as a map of that size, thus not
    shifted; everything else, and ``pad_small_map=True``, is mmpretrain's.
    """

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Map tokens [B, H * W, D] of a map H x W to [B, H * W, D]."""
        H, W = hw_shape
        if self.pad_small_map or min(H, W) >= self.window_size:
            return super().forward(query, hw_shape)
        padded_H, padded_W = max(H, self.window_size), max(W, self.window_size)
        query = F.pad(query.unflatten(1, (H, W)), (0, 0, 0, padded_W - W, 0, padded_H - H))
        query = super().forward(query.flatten(1, 2), (padded_H, padded_W))
        return query.unflatten(1, (padded_H, padded_W))[:, :H, :W].flatten(1, 2)

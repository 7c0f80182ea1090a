"""Cross-covariance and class attention of XCiT, drop-in for mmpretrain's: same forward, same parameter names."""

from mmpretrain.models.backbones.xcit import XCA, ClassAttntion
from torch import Tensor

from mmspectral import ops
from mmspectral.layers import Conditioning, build_conditioning, condition_linear
from mmspectral.models.attention.adopt import condition_qkv
from mmspectral.registry import MODELS


@MODELS.register_module()
class SpectralXCA(XCA):
    """Cross-covariance attention with spectral conditioning of q, k and v.

    With ``conditioning=None`` the outputs are bit-equal to mmpretrain's ``XCA``
    in float32; in half precision norms, logits and softmax stay in float32.

    Args:
        dim: Channels D.
        num_heads: Heads h.
        qkv_bias: Whether the fused projection has a bias.
        attn_drop: Dropout on the attention matrix.
        proj_drop: Dropout on the output.
        conditioning: None, or a dict for :func:`mmspectral.layers.build_conditioning`.
        init_cfg: As in mmengine's ``BaseModule``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        conditioning: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, attn_drop, proj_drop, init_cfg)
        condition_qkv(self, build_conditioning(conditioning))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, N, D] to [B, N, D]."""
        B, N, D = x.shape
        q, k, v = self._project(x)
        attn_drop = self.attn_drop.p if self.training else 0.0
        x = ops.cross_covariance_attention(q, k, v, self.temperature, attn_drop)
        x = x.permute(0, 3, 1, 2).reshape(B, N, D)
        return self.proj_drop(self.proj(x))

    def attention_logits(self, x: Tensor) -> Tensor:
        """Return the attention logits [B, h, d, d], for tokens [B, N, D]."""
        q, k, _ = self._project(x)
        return ops.cross_covariance_logits(q, k, self.temperature)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, D // self.num_heads)
        return qkv.permute(2, 0, 3, 4, 1).unbind(0)  # each [B, h, d, N]


def condition_class_attention(attention: ClassAttntion, conditioning: Conditioning | None) -> None:
    """Condition the separate q, k and v projections of a class-attention layer, in place."""
    for role in ("q", "k", "v"):
        condition_linear(attention, role, conditioning, (role,), attention.num_heads)

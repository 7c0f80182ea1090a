"""Cross-covariance and class attention of XCiT, drop-in for mmpretrain's: same forward, same parameter names."""

from mmpretrain.models.backbones.xcit import XCA, ClassAttntion
from torch import Tensor

from mmspectral import ops
from mmspectral.layers import Conditioning, condition_linear
from mmspectral.models.attention.adopt import ConditionedAttention
from mmspectral.registry import MODELS


@MODELS.register_module()
class SpectralXCA(ConditionedAttention, XCA):
    """Cross-covariance attention with spectral conditioning of q, k and v.

    With ``conditioning=None`` the outputs are bit-equal to mmpretrain's ``XCA``
    in float32; in half precision norms, logits and softmax stay in float32.

    Arguments are those of ``XCA``, and ``conditioning`` by name.
    """

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
        return tuple(part.mT for part in super()._project(x))  # each [B, h, d, N]


def condition_class_attention(attention: ClassAttntion, conditioning: Conditioning | None) -> None:
    """Condition the separate q, k and v projections of a class-attention layer, in place."""
    for role in ("q", "k", "v"):
        condition_linear(attention, role, conditioning, (role,), attention.num_heads)

"""Channel attention of DaViT (arXiv 2204.03645, section 3.3), drop-in for mmpretrain's.

Shape legend: B images, N tokens, h heads (channel groups), d channels per head, D = h * d.
"""

from mmpretrain.models.backbones.davit import ChannelAttention
from torch import Tensor

from mmspectral.models.attention.adopt import ConditionedAttention
from mmspectral.ops.precision import at_least_float32, without_autocast
from mmspectral.registry import MODELS


@MODELS.register_module()
class SpectralChannelAttention(ConditionedAttention, ChannelAttention):
    """Channel attention with spectral conditioning of q, k and v.

    For each head the output is q softmax(k^T v / sqrt(d))^T with q, k, v [N, d]:
    channels of k attend to channels of v, and what is averaged are the channels
    of q. In the terms of dot-product attention k plays the query, v the key and
    q the value. ``targets`` of the conditioning go by the rows of the fused
    weight, as in the paper: q the first D rows, k the next, v the last.

    The logits are sums over all N tokens of unnormalised products, so that C in
    both k and v makes the softmax one-hot at initialisation: with C = lambda I on
    layer-normalised tokens the diagonal is about lambda^2 N / sqrt(d). Share of
    maximal entropy at the start (weights of std 0.02, probe tokens of correlation
    .5) in DaViT-T at 224 pixels:

    =====================  ==========  ==========  ===========  ===============================
    stage                  lambda = 0  lambda = 1  lambda = 10  lambda = 10, preserve_norm 0.02
    =====================  ==========  ==========  ===========  ===============================
    first (N 3136, D 96)   31 %        0.4 %       0.0 %        7 %
    last (N 49, D 768)     81 %        32 %        0.1 %        78 %
    =====================  ==========  ==========  ===========  ===============================

    ``targets=('q',)`` conditions the matrix that plays the value and leaves the
    logits as they are for lambda = 0. Scaling by N^-1/2 instead of d^-1/2, as
    later models do, does not help: 3 % in the first stage at lambda = 1.

    With ``conditioning=None`` the outputs are bit-equal to mmpretrain's
    ``ChannelAttention`` in float32; in half precision logits and softmax stay in
    float32.

    Arguments are those of ``ChannelAttention``, and ``conditioning`` by name.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, N, D] to [B, N, D]."""
        B, N, D = x.shape
        q, k, v = self._project(x)
        attn = self._logits(k, v).softmax(dim=-1)  # [B, h, d, d]
        with without_autocast(x.device):
            x = (attn.to(q.dtype) @ q.transpose(-1, -2)).transpose(-1, -2)  # [B, h, N, d]
        return self.proj(x.transpose(1, 2).reshape(B, N, D))

    def attention_logits(self, x: Tensor) -> Tensor:
        """Return the attention logits [B, h, d, d] (rows k, columns v), for tokens [B, N, D]."""
        _, k, v = self._project(x)
        return self._logits(k, v)

    def _logits(self, k: Tensor, v: Tensor) -> Tensor:
        # A sum over thousands of tokens leaves the range and the precision of half-precision numbers.
        k, v = at_least_float32(k), at_least_float32(v)
        with without_autocast(k.device):
            return (k * self.scale).transpose(-1, -2) @ v

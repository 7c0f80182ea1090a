"""Normalisation of queries and keys (arXiv 2302.05442, section 2; timm's ``qk_norm``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspectral.layers.base import Conditioning, is_finite_number, register_conditioning
from mmspectral.layers.switched_linear import SwitchedLinear
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.precision import at_least_float32


class HeadLayerNorm(nn.LayerNorm):
    """Layer norm with gain and without bias over the d channels of a head, in float32 or better."""

    def __init__(self, d: int, eps: float, **kwargs) -> None:
        super().__init__(d, eps, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        weight = at_least_float32(self.weight)
        return F.layer_norm(at_least_float32(x).to(weight.dtype), self.normalized_shape, weight, None, self.eps)


class HeadRMSNorm(nn.RMSNorm):
    """Root-mean-square norm with gain over the d channels of a head, in float32 or better."""

    def __init__(self, d: int, eps: float, **kwargs) -> None:
        super().__init__(d, eps, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        weight = at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x).to(weight.dtype), self.normalized_shape, weight, self.eps)


NORMS = {"layer": HeadLayerNorm, "rms": HeadRMSNorm}


@register_conditioning
class QKNorm(Conditioning):
    """Normalise q and k of each token and head, with a learned gain per channel.

    Without bias both norms give vectors of length at most sqrt(d) max|gain|, so
    dot-product logits at scale 1 / sqrt(d) stay within
    sqrt(d) max|gain_q| max|gain_k|, whatever the weights and tokens are. One
    gain is shared by the heads, as in timm and ViT-22B.

    Args:
        norm: ``"layer"`` (ViT-22B and timm's default) or ``"rms"``.
        eps: Added to the variance or mean square.
        targets: ``("q", "k")`` or one of them.

    Raises:
        ValueError: Unknown norm or target, ``eps`` not positive, or v targeted.
    """

    def __init__(self, norm: str = "layer", eps: float = 1e-6, targets: Sequence[str] = ("q", "k")) -> None:
        super().__init__(targets)
        if "v" in self.targets:
            raise ValueError(f"QKNorm normalises q and k; take v out of targets={targets!r}.")
        if norm not in tuple(NORMS):
            raise ValueError(f"QKNorm: norm must be one of {', '.join(NORMS)}, got {norm!r}.")
        if not (is_finite_number(eps) and eps > 0):
            raise ValueError(f"QKNorm: eps must be positive and finite, got {eps!r}.")
        self.norm = norm
        self.eps = eps

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return QKNormLinear(linear, self, layout)

    def settings(self) -> dict:
        return dict(super().settings(), norm=self.norm, eps=self.eps)


class QKNormLinear(SwitchedLinear, nn.Linear):
    """Projection followed by the norms ``q_norm`` and ``k_norm`` of what it projects to.

    Args:
        linear: The projection to replace.
        conditioning: Settings.
        layout: What the rows of the weight are.
    """

    def make_state(self) -> None:
        """Make ``q_norm`` and ``k_norm``, with gains of one."""
        form = dict(device=self.weight.device, dtype=self.weight.dtype)
        for p in self.targeted:
            norm = NORMS[self.conditioning.norm](self.rows_per_head, self.conditioning.eps, **form)
            self.add_module(f"{self.layout.roles[p]}_norm", norm.requires_grad_(self.weight.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [..., E] to [..., P * D]."""
        y = F.linear(x, self.weight, self.bias)
        P, h, d = len(self.layout.roles), self.layout.num_heads, self.rows_per_head
        interleaved = self.layout.row_order == "[heads][3][d]"
        projections = y.unflatten(-1, (h, P, d) if interleaved else (P, h, d))
        axis = -2 if interleaved else -3
        parts = list(projections.unbind(axis))  # each [..., h, d]
        for p in self.targeted:
            parts[p] = self.get_submodule(f"{self.layout.roles[p]}_norm")(parts[p]).to(y.dtype)
        return torch.stack(parts, axis).flatten(-3)

    def folded(self) -> nn.Linear:
        """Refuse: the norms depend on the token.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "QKNorm cannot be folded: it divides q and k by a length that differs from token to token, "
            "which no weight can do. Keep the projection as it is, with its q_norm and k_norm."
        )

"""Corrections C that condition a projection: their settings and how they are applied.

A correction is not state (no parameter, not in ``state_dict``): it follows from
its settings. It is built from a dict, ``dict(type='IdentityCorrection', scale=10.0)``.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.layers.base import Conditioning, register_conditioning
from mmspectral.layers.projections import ConditionedLinear
from mmspectral.ops import ProjectionLayout


class Correction(Conditioning):
    """Base of all corrections C: the projection computes x (W + C)^T.

    Args:
        scope: ``"full"`` takes each D x E projection as the matrix to condition,
            ``"head"`` each d x E block of a head.
        targets: Which of ``"q"``, ``"k"``, ``"v"`` are conditioned.
        preserve_function: Whether weights loaded from a checkpoint that was
            trained without this correction have C subtracted, so that the
            model computes what it did there.

    Raises:
        ValueError: Unknown scope or target.
    """

    def __init__(
        self, scope: str = "full", targets: Sequence[str] = ("q", "k", "v"), preserve_function: bool = False
    ) -> None:
        super().__init__(targets)
        if scope not in ops.SCOPES:
            raise ValueError(f"{type(self).__name__}: scope must be one of {ops.SCOPES}, got {scope!r}.")
        self.scope = scope
        self.preserve_function = preserve_function

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: ProjectionLayout) -> Tensor:
        """Return x (W + C)^T + b: x [..., E], weight [P * D, E], result [..., P * D]."""

    @abstractmethod
    def corrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return W + C as a new tensor [P * D, E] in the dtype of ``weight``."""

    def matrix(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return C [P * D, E] for the projection ``weight``."""
        return self.corrected(torch.zeros_like(weight), layout)

    def uncorrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return the W of which ``weight`` is W + C [P * D, E]."""
        return weight - self.matrix(weight, layout)

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return ConditionedLinear.from_linear(linear, self, layout)

    def settings(self) -> dict:
        return dict(super().settings(), scope=self.scope)


@register_conditioning
class IdentityCorrection(Correction):
    """C = lambda * I_k (arXiv 2603.07162, Theorem 3.8; the paper's choice is lambda = 10).

    By Weyl's inequality kappa(W + C) <= (lambda + s) / (lambda - s) for a square
    W with largest singular value s < lambda; nothing is guaranteed beyond.
    Dot-product attention on normalised tokens starts one-hot at lambda = 10,
    cross-covariance attention does not: it normalises q and k.

    Args:
        scale: lambda.
        scope: See :class:`Correction`.
        targets: See :class:`Correction`.
        preserve_function: See :class:`Correction`.

    Raises:
        ValueError: ``scale`` is not a finite number.
    """

    def __init__(
        self,
        scale: float = 10.0,
        scope: str = "full",
        targets: Sequence[str] = ("q", "k", "v"),
        preserve_function: bool = False,
    ) -> None:
        super().__init__(scope, targets, preserve_function)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) < float("inf"):
            raise ValueError(f"IdentityCorrection: scale must be a finite number, got {scale!r}.")
        self.scale = float(scale)

    def _scales(self, layout: ProjectionLayout) -> tuple[float, ...]:
        return tuple(self.scale if role in self.targets else 0.0 for role in layout.roles)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: ProjectionLayout) -> Tensor:
        return ops.conditioned_linear(x, weight, bias, self._scales(layout), layout, self.scope)

    def corrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        return ops.add_identity(weight, self._scales(layout), layout, self.scope)

    def settings(self) -> dict:
        return dict(super().settings(), scale=self.scale)

"""Corrections C that condition a projection: what they have in common, and the scaled identity.

A correction is not state (no parameter, not in ``state_dict``): it follows from
its settings, or from W (:mod:`mmspectral.layers.derived`). It is built from a
dict, ``dict(type='IdentityCorrection', scale=10.0)``.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.layers.base import Conditioning, is_finite_number, register_conditioning
from mmspectral.layers.projection import ConditionedLinear
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

    invertible = True  # W follows from W + C, by `uncorrected`
    stored = False  # C is a buffer of the projection, refreshed now and then

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
    cross-covariance attention does not: it normalises q and k. The
    norm-preserving form s (W + C) has the kappa of W + C and, at the start, the
    Frobenius norm and so about the logits of W; the gradient with respect to W
    is s times that with respect to s (W + C).

    Args:
        scale: lambda, or one for each projection, ``dict(q=1.0, v=10.0)``;
            a projection that the dict leaves out has 0.
        scope: See :class:`Correction`.
        targets: See :class:`Correction`.
        preserve_function: See :class:`Correction`.
        preserve_norm: None, or the standard deviation of the weights at the
            start (0.02 for the truncated normal of ViT, Swin and XCiT). Then
            s^2 = E|W|_F^2 / (E|W|_F^2 + |C|_F^2) for each projection by itself.
            It follows from the settings, so it is no state and never changes.

    Raises:
        ValueError: ``scale`` is not a finite number or names something that is
            not among ``targets``; ``preserve_norm`` is not a positive number.
    """

    def __init__(
        self,
        scale: float | Mapping[str, float] = 10.0,
        scope: str = "full",
        targets: Sequence[str] = ("q", "k", "v"),
        preserve_function: bool = False,
        preserve_norm: float | None = None,
    ) -> None:
        super().__init__(scope, targets, preserve_function)
        per_target = isinstance(scale, Mapping)
        if per_target and (not scale or not set(scale) <= set(self.targets)):
            raise ValueError(
                f"IdentityCorrection: scale must have keys out of the targets {', '.join(self.targets)}, "
                f"got {dict(scale)!r}."
            )
        if not all(is_finite_number(value) for value in (scale.values() if per_target else [scale])):
            raise ValueError(f"IdentityCorrection: scale must be a finite number, or a dict of them, got {scale!r}.")
        if preserve_norm is not None and not (is_finite_number(preserve_norm) and preserve_norm > 0):
            raise ValueError(
                "IdentityCorrection: preserve_norm must be None or the standard deviation of the initial weights, "
                f"a positive number such as 0.02, got {preserve_norm!r}."
            )
        self.scale = {role: float(value) for role, value in scale.items()} if per_target else float(scale)
        self.preserve_norm = None if preserve_norm is None else float(preserve_norm)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: ProjectionLayout) -> Tensor:
        scales, factors = self._scales_and_factors(weight, layout)
        return ops.conditioned_linear(x, weight, bias, scales, layout, self.scope, factors)

    def corrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return W + C, or s (W + C) with ``preserve_norm``, [P * D, E]."""
        scales, factors = self._scales_and_factors(weight, layout)
        return ops.add_identity(weight, scales, layout, self.scope, factors)

    def matrix(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return C [P * D, E], without the factor s of ``preserve_norm``."""
        return ops.add_identity(torch.zeros_like(weight), self._scales(layout), layout, self.scope)

    def uncorrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return the W of which ``weight`` is W + C, or s (W + C) with ``preserve_norm``, [P * D, E]."""
        _, factors = self._scales_and_factors(weight, layout)
        inverse = None if factors is None else [1 / factor for factor in factors]
        return ops.add_identity(weight, [-scale for scale in self._scales(layout)], layout, self.scope, inverse)

    def settings(self) -> dict:
        norm = {} if self.preserve_norm is None else dict(preserve_norm=self.preserve_norm)
        return dict(super().settings(), scale=self.scale, **norm)

    def _scales(self, layout: ProjectionLayout) -> tuple[float, ...]:
        scale = self.scale if isinstance(self.scale, dict) else dict.fromkeys(self.targets, self.scale)
        return tuple(scale.get(role, 0.0) for role in layout.roles)

    def _scales_and_factors(
        self, weight: Tensor, layout: ProjectionLayout
    ) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
        scales = self._scales(layout)
        if self.preserve_norm is None:
            return scales, None
        factors = ops.norm_factors(scales, tuple(weight.shape), layout, self.scope, self.preserve_norm)
        return tuple(s * scale for s, scale in zip(factors, scales, strict=True)), factors

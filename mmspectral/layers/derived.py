"""Corrections that follow from W: sigma_max U V^T of W = U S V^T (arXiv 2603.07162, Theorem 3.5)."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspectral import ops
from mmspectral.layers.base import register_conditioning
from mmspectral.layers.corrections import Correction
from mmspectral.ops import ProjectionLayout


class DerivedCorrection(Correction):
    """Base of the corrections that are functions of W: constant for autograd, found again as W changes.

    With ``interval=1`` C is found in every forward pass and is no state. With a
    longer interval it is the buffer ``correction`` of the projection (so
    ``qkv.correction`` in the state dict), changed only

    - when the projection gets a weight: built, assigned, drawn by an
      initialiser, or loaded from a state dict that has no ``correction``;
    - by :func:`mmspectral.layers.refresh_corrections`, which
      :class:`mmspectral.engine.hooks.CorrectionRefreshHook` calls every
      ``interval`` updates of the optimizer; other training loops call it
      themselves.

    So neither evaluation nor a second forward pass in one update (accumulated
    gradients, gradient checkpointing, several losses) changes it, and a run that
    is resumed continues as it would have. C is a deterministic function of W:
    ranks with equal weights, hardware and libraries have equal C and need not
    communicate. A copy with averaged weights (EMA) must be refreshed before use;
    the hook does it for mmengine's ``EMAHook``.

    Args:
        interval: Updates of the optimizer from one C to the next.
        scope: See :class:`Correction`.
        targets: See :class:`Correction`.
        preserve_function: Must be False.

    Raises:
        ValueError: ``interval`` is not a positive integer, or
            ``preserve_function`` is set.
    """

    def __init__(
        self,
        interval: int = 1,
        scope: str = "full",
        targets: Sequence[str] = ("q", "k", "v"),
        preserve_function: bool = False,
    ) -> None:
        super().__init__(scope, targets, preserve_function)
        name = type(self).__name__
        if preserve_function:
            raise ValueError(
                f"{name}: preserve_function=True is not possible. C follows from W and changes with every update, so "
                "there is no constant to subtract from a loaded weight. Use IdentityCorrection, or load without it."
            )
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"{name}: interval must be a positive integer, got {interval!r}.")
        self.interval = interval

    @property
    def stored(self) -> bool:
        return self.interval > 1

    @abstractmethod
    def blocks(self, matrices: Tensor) -> Tensor:
        """Return the C of each matrix [..., rows, columns], in float32 or better, without gradient."""

    def matrix(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return C [P * D, E] of ``weight``, in float32 or better."""
        with torch.no_grad():
            matrices = ops.split_projections(weight, layout, self.scope)  # [P, D, E] or [P, h, d, E]
            targeted = [p for p, role in enumerate(layout.roles) if role in self.targets]
            found = self.blocks(matrices[targeted])
            C = found.new_zeros(matrices.shape)
            C[targeted] = found
            return ops.merge_projections(C, layout)

    def corrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return W + C [P * D, E], summed in float32 or better, in the dtype of ``weight``."""
        return (weight + self.matrix(weight, layout)).to(weight.dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: ProjectionLayout) -> Tensor:
        return F.linear(x, self.corrected(weight, layout), bias)

    def settings(self) -> dict:
        return dict(super().settings(), interval=self.interval)


@register_conditioning
class SVDCorrection(DerivedCorrection):
    """C = sigma_max U V^T, exact (arXiv 2603.07162, Theorem 3.5).

    kappa(W + C) = 2 s_1 / (s_1 + s_min) <= 2 for every W but 0, whose C is 0. In
    the paper an SVD in every step made training 1.41 times as long.

    Args:
        interval: See :class:`DerivedCorrection`.
        scope: See :class:`Correction`.
        targets: See :class:`Correction`.
        preserve_function: Must be False.
    """

    def blocks(self, matrices: Tensor) -> Tensor:
        return ops.svd_correction(matrices)

    def uncorrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return W = W' - (s_1(W') / 2) U V^T for W' = W + C(W); valid where kappa(W') <= 2.

        Singular values below s_1 / 2 would have to come from negative ones:
        such a W' is the W + C(W) of no W.
        """
        return (weight - self.matrix(weight, layout) / 2).to(weight.dtype)


@register_conditioning
class PolarCorrection(DerivedCorrection):
    """The C of :class:`SVDCorrection` by matrix products alone (Polar Express, arXiv 2505.16932).

    kappa(W + C) <= 2.05 for kappa(W) <= ``kappa``, and the number of products
    follows from it. Beyond, kappa(W + C) grows with kappa(W), and singular values
    of zero stay zero, which an SVD repairs.

    Args:
        kappa: Largest condition number of W for which that holds.
        interval: See :class:`DerivedCorrection`.
        scope: See :class:`Correction`.
        targets: See :class:`Correction`.
        preserve_function: Must be False.

    Raises:
        ValueError: ``kappa`` is not a number in (1, 1e6]: float32 has no more.
    """

    invertible = False

    def __init__(
        self,
        kappa: float = 1e3,
        interval: int = 1,
        scope: str = "full",
        targets: Sequence[str] = ("q", "k", "v"),
        preserve_function: bool = False,
    ) -> None:
        super().__init__(interval, scope, targets, preserve_function)
        if isinstance(kappa, bool) or not isinstance(kappa, (int, float)) or not 1 < kappa <= 1e6:
            raise ValueError(
                f"PolarCorrection: kappa must be a number in (1, 1e6] (float32 resolves no more), got {kappa!r}."
            )
        self.kappa = float(kappa)

    def blocks(self, matrices: Tensor) -> Tensor:
        return ops.polar_correction(matrices, self.kappa)

    def uncorrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        raise ValueError(
            "PolarCorrection: W does not follow from W + C alone. Unfold with the sites that fold returned, "
            "which remember C, or use SVDCorrection."
        )

    def settings(self) -> dict:
        return dict(super().settings(), kappa=self.kappa)

"""Corrections C that condition a projection: the scaled identity, sigma_max U V^T, and their ``nn.Linear``.

A correction is not state (no parameter, not in ``state_dict``): it follows from
its settings, or from W. It is built from a dict,
``dict(type='IdentityCorrection', scale=10.0)``.
"""

import warnings
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from mmspectral import ops
from mmspectral.arguments import FLAG, check, whole
from mmspectral.layers.projection import (
    METADATA_KEY,
    Conditioning,
    Follows,
    Projection,
    changed_function,
    is_finite_number,
    positive,
    register_conditioning,
)
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.precision import at_least_float32


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
        self.preserve_function = check(f"{type(self).__name__}: preserve_function", preserve_function, FLAG)

    @abstractmethod
    def corrected(self, weight: Tensor, layout: ProjectionLayout, dtype: torch.dtype | None = None) -> Tensor:
        """Return W + C as a new tensor [P * D, E], summed in float32 or better, in ``dtype`` or that of ``weight``."""

    def matrix(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return C [P * D, E] for the projection ``weight``."""
        return self.corrected(torch.zeros_like(weight), layout)

    def uncorrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        """Return the W of which ``weight`` is W + C [P * D, E]."""
        return weight - self.matrix(weight, layout)

    def traced(self, proxy: fx.Proxy, weight: Tensor, layout: ProjectionLayout) -> fx.Proxy:
        """Return W + C under ``torch.fx`` tracing, where ``proxy`` stands for W, with C as a constant of the graph.

        Raises:
            TypeError: C follows from W, which a graph of constants cannot hold.
        """
        raise TypeError(f"torch.fx cannot trace {self}: its C follows from W. Fold the model first.")

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return ConditionedLinear(linear, self, layout)

    def effect(self, layout: ProjectionLayout) -> Hashable:
        by_head = self.scope == "head" or layout.heads_first
        rows = (layout.num_heads, layout.row_order) if by_head else ()
        return repr(self.settings()), self._strengths(layout), rows

    def _strengths(self, layout: ProjectionLayout) -> tuple[float, ...]:
        return tuple(float(role in self.targets) for role in layout.roles)

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
        if preserve_norm is not None:
            kind = "None or the standard deviation of the initial weights, a positive number such as 0.02"
            preserve_norm = positive("IdentityCorrection: preserve_norm", preserve_norm, kind)
        self.scale = {role: float(value) for role, value in scale.items()} if per_target else float(scale)
        self.preserve_norm = preserve_norm

    def corrected(self, weight: Tensor, layout: ProjectionLayout, dtype: torch.dtype | None = None) -> Tensor:
        scales, factors = self._scales_and_factors(weight, layout)
        return ops.add_identity(weight, scales, layout, self.scope, factors, dtype)

    def matrix(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        return ops.add_identity(torch.zeros_like(weight), self._strengths(layout), layout, self.scope)

    def uncorrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        _, factors = self._scales_and_factors(weight, layout)
        inverse = None if factors is None else [1 / factor for factor in factors]
        return ops.add_identity(weight, [-scale for scale in self._strengths(layout)], layout, self.scope, inverse)

    def traced(self, proxy: fx.Proxy, weight: Tensor, layout: ProjectionLayout) -> fx.Proxy:
        _, factors = self._scales_and_factors(weight, layout)
        C = self.corrected(torch.zeros_like(weight), layout).detach()
        if factors is None:
            return proxy + C
        return proxy * layout.row_factors(weight.new_tensor(factors), len(weight))[:, None] + C

    def settings(self) -> dict:
        norm = {} if self.preserve_norm is None else dict(preserve_norm=self.preserve_norm)
        return dict(super().settings(), scale=self.scale, **norm)

    def _strengths(self, layout: ProjectionLayout) -> tuple[float, ...]:
        scale = self.scale if isinstance(self.scale, dict) else dict.fromkeys(self.targets, self.scale)
        return tuple(scale.get(role, 0.0) for role in layout.roles)

    def _scales_and_factors(
        self, weight: Tensor, layout: ProjectionLayout
    ) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
        scales = self._strengths(layout)
        if self.preserve_norm is None:
            return scales, None
        factors = ops.norm_factors(scales, tuple(weight.shape), layout, self.scope, self.preserve_norm)
        return tuple(s * scale for s, scale in zip(factors, scales, strict=True)), factors


class DerivedCorrection(Correction):
    """Base of the corrections that are functions of W: constant for autograd, recomputed as W changes.

    With ``interval=1`` C is computed in every forward pass and is no state. With a
    longer interval it is the buffer ``correction`` of the projection (so
    ``qkv.correction`` in the state dict), changed only

    - when the projection gets a weight: built, assigned, re-initialised, or
      loaded from a state dict that has no ``correction``;
    - by :func:`mmspectral.layers.refresh_corrections`, which
      :class:`mmspectral.engine.hooks.CorrectionRefreshHook` calls every
      ``interval`` updates of the optimizer; other training loops call it
      themselves.

    So neither evaluation nor a second forward pass in one update (accumulated
    gradients, gradient checkpointing, several losses) changes it, and a run that
    is resumed continues as it would have. C is a deterministic function of W:
    ranks with equal weights, hardware and libraries have equal C and need not
    communicate. An average of weights (EMA, SWA) has the C of its own W.

    Args:
        interval: Updates of the optimizer from one C to the next.

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
        if self.preserve_function:
            raise ValueError(
                f"{name}: preserve_function=True is not possible. C follows from W and changes with every update, so "
                "there is no constant to subtract from a loaded weight. Use IdentityCorrection, or load without it."
            )
        self.interval = check(f"{name}: interval", interval, whole(1))

    @property
    def stored(self) -> bool:
        return self.interval > 1

    @abstractmethod
    def blocks(self, matrices: Tensor) -> Tensor:
        """Return the C of each matrix [..., rows, columns], in float32 or better, without gradient."""

    def matrix(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        with torch.no_grad():
            matrices = layout.split(weight, self.scope)  # [P, D, E] or [P, h, d, E]
            targeted = [p for p, role in enumerate(layout.roles) if role in self.targets]
            found = self.blocks(matrices[targeted])
            C = found.new_zeros(matrices.shape)
            C[targeted] = found
            return layout.merge(C)

    def corrected(self, weight: Tensor, layout: ProjectionLayout, dtype: torch.dtype | None = None) -> Tensor:
        return (weight + self.matrix(weight, layout)).to(dtype or weight.dtype)

    def settings(self) -> dict:
        return dict(super().settings(), interval=self.interval)


@register_conditioning
class SVDCorrection(DerivedCorrection):
    """C = sigma_max U V^T, exact (arXiv 2603.07162, Theorem 3.5).

    kappa(W + C) = 2 s_1 / (s_1 + s_min) <= 2 for every W but 0, whose C is 0. In
    the paper an SVD in every step made training 1.41 times as long.
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
        if not is_finite_number(kappa) or not 1 < kappa <= 1e6:
            raise ValueError(
                f"PolarCorrection: kappa must be a number in (1, 1e6] (float32 resolves no more), got {kappa!r}."
            )
        self.kappa = float(kappa)

    def blocks(self, matrices: Tensor) -> Tensor:
        return ops.polar_correction(matrices, self.kappa)

    def uncorrected(self, weight: Tensor, layout: ProjectionLayout) -> Tensor:
        raise ValueError(
            "PolarCorrection: W does not follow from W + C alone. Unfold the model that fold left, "
            "which keeps C, or use SVDCorrection."
        )

    def settings(self) -> dict:
        return dict(super().settings(), kappa=self.kappa)


class ConditionedLinear(Follows, Projection, nn.Linear):
    """``nn.Linear`` that computes x (W + C)^T + b; its parameters are W and b.

    C goes onto the weight in every precision: the sum is formed in float32 and
    rounded once to the dtype of the product. Names and shapes in ``state_dict``
    are those of ``nn.Linear``, and ``correction`` where C is stored
    (:class:`DerivedCorrection` with an interval). A state dict without it loads,
    and C is computed from the loaded W.

    Raises:
        ValueError: The rows do not fit the layout, or the layout not the scope.
    """

    has_refresher = False

    def followed(self) -> list[Tensor]:
        return [self.own("weight"), self.correction] if "correction" in self._buffers else []

    def make_state(self) -> None:
        weight = self.own("weight")
        self.conditioning.corrected(weight.to("meta"), self.layout)
        if self.conditioning.stored:
            self.register_buffer("correction", torch.empty_like(weight, requires_grad=False))
            self.refresh()

    def correction_matrices(self) -> dict[str, Tensor]:
        """Return the C in use by name of the parameter that it is added to."""
        return {"weight": self.correction_matrix()}

    def correction_matrix(self) -> Tensor:
        """Return the C in use [P * D, E]."""
        weight = self.own("weight")
        if not self.conditioning.stored:
            return self.conditioning.matrix(weight, self.layout)
        if self.training and torch.is_grad_enabled():
            self.follow(trains=True)
        elif self.has_changed():
            # The buffer stays: a hook may have put averaged weights here for an evaluation in the midst of training.
            def found() -> Tensor:
                return self.conditioning.matrix(weight, self.layout).to(weight.dtype)

            return self.once(weight, found, self.correction)
        return self.correction

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute a stored C from the present W; nothing happens where C is not stored.

        A W that is sharded over ranks by ``fully_shard`` is gathered, for which all of them must call.
        """
        if not self.conditioning.stored:
            return
        weight = self.own("weight")
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        C = self.conditioning.matrix(whole, self.layout)
        if (self.correction.device, self.correction.dtype) == (weight.device, weight.dtype):
            self.correction.copy_(C)
        else:
            self.correction = C.to(weight.dtype)
        self.mark()

    def forward(self, x: Tensor) -> Tensor:
        if self.conditioning.stored and self.training and not self.has_refresher and torch.is_grad_enabled():
            self.has_refresher = True  # say it once
            warnings.warn(
                f"training with {self.conditioning} but nothing refreshes C: put dict(type='mmspectral."
                "CorrectionRefreshHook') into custom_hooks, or call mmspectral.layers.refresh_corrections(model, "
                "updates) before each update.",
                stacklevel=2,
            )
        return super().forward(x)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as ``nn.Module`` does, also on assignment; a new weight gets its own C."""
        super().register_parameter(name, param)
        if name == "weight" and "correction" in self._buffers:
            self.refresh()

    def _effective(self, name: str, dtype: torch.dtype | None) -> Tensor:
        weight = self.own("weight")
        if isinstance(weight, fx.Proxy):
            return self.conditioning.traced(weight, self._parameters["weight"], self.layout)
        if self.conditioning.stored:
            return (at_least_float32(weight) + at_least_float32(self.correction_matrix())).to(dtype or weight.dtype)
        return self.conditioning.corrected(weight, self.layout, dtype)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*arguments)
        if f"{prefix}weight" not in state_dict:
            return
        trained = local_metadata.get(METADATA_KEY)
        if trained not in (None, self.note()):
            # torch raises what is collected here, mmengine logs it.
            error_msgs.append(changed_function(f"{prefix}weight", trained, self.note()))
        key = f"{prefix}correction"
        if self.conditioning.stored and key not in state_dict:
            missing_keys[:] = [missing for missing in missing_keys if missing != key]
            self.refresh()
        self._trained = False
        self.mark()

"""Corrections C that condition a projection: their settings and how they are applied.

A correction is not state (no parameter, not in ``state_dict``): it follows from
its settings. It is built from a dict, ``dict(type='IdentityCorrection', scale=10.0)``.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mmspectral import ops
from mmspectral.ops import ProjectionLayout

PREFIX = "mmspectral."
_CORRECTIONS: dict[str, type["Correction"]] = {}


class Correction(ABC):
    """Base of all corrections.

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
        if scope not in ops.SCOPES:
            raise ValueError(f"{type(self).__name__}: scope must be one of {ops.SCOPES}, got {scope!r}.")
        if not targets or not set(targets) <= {"q", "k", "v"} or isinstance(targets, str):
            raise ValueError(
                f"{type(self).__name__}: targets must be a non-empty list out of q, k, v, got {targets!r}."
            )
        self.scope = scope
        self.targets = tuple(targets)
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

    def settings(self) -> dict:
        """Return the dict that builds this correction again (without loading policy)."""
        return dict(type=type(self).__name__, scope=self.scope, targets=list(self.targets))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Correction) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(repr(self.settings()))

    def __repr__(self) -> str:
        settings = self.settings()
        name = settings.pop("type")
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"


def register_correction(cls: type[Correction]) -> type[Correction]:
    """Make a correction available to ``conditioning=dict(type=...)`` under its class name.

    Raises:
        TypeError: Not a subclass of :class:`Correction`.
        ValueError: Another class has the name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Correction)):
        raise TypeError(f"a correction must subclass mmspectral.layers.Correction, got {cls!r}.")
    known = _CORRECTIONS.setdefault(cls.__name__, cls)
    if known is not cls and known.__module__ != cls.__module__:
        raise ValueError(
            f"the name {cls.__name__} is taken by {known.__module__}.{known.__qualname__}; choose another."
        )
    _CORRECTIONS[cls.__name__] = cls
    return cls


@register_correction
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


def build_correction(cfg: dict | Correction | None) -> Correction | None:
    """Build a correction from ``conditioning=dict(type=..., ...)``.

    Args:
        cfg: None (no conditioning), a correction, or a dict whose ``type`` is a
            name known to :func:`register_correction`, bare or with the prefix
            ``mmspectral.``. ``_scope_``, which config inheritance adds, is ignored.

    Raises:
        TypeError: Not a dict, or an argument that the type does not have.
        KeyError: Unknown type.
    """
    if cfg is None or isinstance(cfg, Correction):
        return cfg
    if not isinstance(cfg, dict) or not isinstance(cfg.get("type"), str):
        raise TypeError(f"conditioning must be None or a dict with a string 'type', got {cfg!r}.")
    arguments = {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}
    name = cfg["type"].removeprefix(PREFIX)
    if name not in _CORRECTIONS:
        raise KeyError(
            f"unknown conditioning type {cfg['type']!r}; known: {', '.join(sorted(_CORRECTIONS))}. "
            "Register your own class with mmspectral.layers.register_correction."
        )
    cls = _CORRECTIONS[name]
    accepted = list(inspect.signature(cls).parameters)
    unknown = sorted(set(arguments) - set(accepted))
    if unknown:
        raise TypeError(
            f"conditioning type {name} has no argument {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(accepted)}. "
            "If a parent config set it for another type, write `_delete_=True` into the child's conditioning dict."
        )
    return cls(**arguments)

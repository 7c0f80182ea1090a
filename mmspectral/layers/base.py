"""Settings of what is done to attention projections, built from ``conditioning=dict(type=...)``.

Anything with such settings can be registered: corrections C that are added to
the weights (:mod:`mmspectral.layers.corrections`) and the alternatives that
practitioners compare with.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from mmspectral.ops import ProjectionLayout

PREFIX = "mmspectral."
_TYPES: dict[str, type["Conditioning"]] = {}
_FLOAT32_LIMIT = torch.finfo(torch.float32).max


def is_finite_number(value: object) -> bool:
    """Return whether ``value`` is an int or float, and no bool, that float32 can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _FLOAT32_LIMIT


class Conditioning(ABC):
    """Base of everything that ``conditioning=dict(type=...)`` can name.

    Args:
        targets: Which of ``"q"``, ``"k"``, ``"v"`` are conditioned.

    Raises:
        ValueError: Unknown target.
    """

    adopts_stock_weights = False  # whether weights trained without it compute the same under it

    def __init__(self, targets: Sequence[str] = ("q", "k", "v")) -> None:
        listed = isinstance(targets, Sequence) and not isinstance(targets, str)
        if not listed or not targets or not all(target in ("q", "k", "v") for target in targets):
            raise ValueError(
                f"{type(self).__name__}: targets must be a non-empty list out of q, k, v, got {targets!r}."
            )
        self.targets = tuple(targets)

    @abstractmethod
    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        """Return the module that takes the place of ``linear`` and shares its parameters."""

    def settings(self) -> dict:
        """Return the dict that builds this conditioning again (without loading policy)."""
        return dict(type=type(self).__name__, targets=list(self.targets))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conditioning) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(repr(self.settings()))

    def __repr__(self) -> str:
        settings = self.settings()
        name = settings.pop("type")
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"


def register_conditioning(cls: type[Conditioning]) -> type[Conditioning]:
    """Make a class available to ``conditioning=dict(type=...)`` under its name.

    Raises:
        TypeError: Not a subclass of :class:`Conditioning`.
        ValueError: Another class has the name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Conditioning)):
        raise TypeError(f"a conditioning must subclass mmspectral.layers.Conditioning, got {cls!r}.")
    known = _TYPES.setdefault(cls.__name__, cls)
    if known is not cls and known.__module__ != cls.__module__:
        raise ValueError(
            f"the name {cls.__name__} is taken by {known.__module__}.{known.__qualname__}; choose another."
        )
    _TYPES[cls.__name__] = cls
    return cls


def build_conditioning(cfg: dict | Conditioning | None) -> Conditioning | None:
    """Build what is named by ``conditioning=dict(type=..., ...)``.

    Args:
        cfg: None (no conditioning), a built one, or a dict whose ``type`` is a
            name known to :func:`register_conditioning`, bare or with the prefix
            ``mmspectral.``. ``_scope_``, which config inheritance adds, is ignored.

    Raises:
        TypeError: Not a dict, or an argument that the type does not have.
        KeyError: Unknown type.
    """
    if cfg is None or isinstance(cfg, Conditioning):
        return cfg
    if not isinstance(cfg, dict) or not isinstance(cfg.get("type"), str):
        raise TypeError(f"conditioning must be None or a dict with a string 'type', got {cfg!r}.")
    arguments = {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}
    name = cfg["type"].removeprefix(PREFIX)
    if name not in _TYPES:
        raise KeyError(
            f"unknown conditioning type {cfg['type']!r}; known: {', '.join(sorted(_TYPES))}. "
            "Register your own class with mmspectral.layers.register_conditioning."
        )
    cls = _TYPES[name]
    accepted = list(inspect.signature(cls).parameters)
    unknown = sorted(set(arguments) - set(accepted))
    if unknown:
        raise TypeError(
            f"conditioning type {name} has no argument {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(accepted)}. "
            "If a parent config set it for another type, write `_delete_=True` into the child's conditioning dict."
        )
    return cls(**arguments)

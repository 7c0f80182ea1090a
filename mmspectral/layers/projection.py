"""What takes the place of an ``nn.Linear`` that projects to q, k or v, and the settings that say how.

:class:`Conditioning` holds settings, built from ``conditioning=dict(type=...)``;
its ``replace`` makes a :class:`Projection`, the base of every such module:
corrections C (:mod:`mmspectral.layers.corrections`) and the alternatives that
practitioners compare with (:mod:`mmspectral.layers.alternatives`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from mmspectral.ops import ProjectionLayout
from mmspectral.ops.precision import product_dtype

PREFIX = "mmspectral."
METADATA_KEY = "conditioning"  # in the metadata of a state dict, by module
_TYPES: dict[str, type[Conditioning]] = {}
_FLOAT32_LIMIT = torch.finfo(torch.float32).max


def is_finite_number(value: object) -> bool:
    """Return whether ``value`` is a number, and no bool, that float32 can hold."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(value) < _FLOAT32_LIMIT


def positive(name: str, value: object, kind: str = "positive and finite") -> float:
    """Return a positive number as a float; raise ValueError for anything else."""
    if not (is_finite_number(value) and value > 0):
        raise ValueError(f"{name} must be {kind}, got {value!r}.")
    return float(value)


class Conditioning(ABC):
    """Base of everything that ``conditioning=dict(type=...)`` can name.

    Args:
        targets: Which of ``"q"``, ``"k"``, ``"v"`` are conditioned.

    Raises:
        ValueError: Unknown target.
    """

    adopts_stock_weights = False  # whether weights trained without it compute the same under it
    changes_weights = True  # whether what is computed with differs from the weight

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

    def effect(self, layout: ProjectionLayout) -> Hashable:
        """Return what it does to a weight with these rows; equal for modules that may share it."""
        return object() if self.changes_weights else None

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


def build_conditioning(cfg: dict | Conditioning | None, option: str = "conditioning") -> Conditioning | None:
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
    accepted = {name: list(inspect.signature(cls).parameters) for name, cls in sorted(_TYPES.items())}
    own = " Register your own class with mmspectral.layers.register_conditioning."
    name, arguments = type_and_arguments(option, cfg, accepted, own)
    return _TYPES[name](**arguments)


def type_and_arguments(
    option: str, cfg: object, accepted: Mapping[str, Sequence[str]], hint: str = ""
) -> tuple[str, dict]:
    """Return the type and the arguments that ``option=dict(type=..., ...)`` gives; ``accepted`` by known type.

    Raises:
        TypeError: Not a dict, or an argument that the type does not have.
        KeyError: Unknown type.
    """
    if not isinstance(cfg, dict) or not isinstance(cfg.get("type"), str):
        raise TypeError(f"{option} must be None or a dict with a string 'type', got {cfg!r}.")
    arguments = {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}
    name = cfg["type"].removeprefix(PREFIX)
    if name not in accepted:
        raise KeyError(f"unknown {option} type {cfg['type']!r}; known: {', '.join(accepted)}.{hint}")
    unknown = sorted(set(arguments) - set(accepted[name]))
    if unknown:
        raise TypeError(
            f"{option} type {name} has no argument {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(accepted[name]) or 'none'}. "
            f"If a parent config set it for another type, write `_delete_=True` into the child's {option} dict."
        )
    return name, arguments


def require_plain(name: str, module: nn.Module) -> None:
    """Raise ValueError where a weight is not a parameter but computed: parametrised, weight-normed or pruned."""
    made = [
        key.removesuffix(suffix) for key in module._parameters for suffix in ("_orig", "_g") if key.endswith(suffix)
    ]
    if is_parametrized(module) or made:
        raise ValueError(
            f"{name or f'this {type(module).__name__}'}: its weight is computed from other parameters, by a "
            "parametrization, weight or spectral norm, or pruning, so that there is no W to condition. Make it "
            "permanent first (torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, prune.remove), "
            "or leave the layer out with `exclude`."
        )


def as_leaf(module: nn.Module, *inputs: object) -> fx.Proxy:
    """Return the call of a module as one node of the graph that ``torch.fx`` traces, as it does with torch's own."""
    tracer = inputs[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})


def in_backward_pass() -> bool:
    """Return whether autograd runs, as it does when activation checkpointing recomputes a forward pass."""
    # No public function tells; torch.utils.checkpoint asks it too.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def fingerprint(*tensors: Tensor) -> list[float] | None:
    """Return numbers that change with what tensors hold, also where ``.data`` was written to, which no version counts.

    None where values cannot be read: traced, compiled, transformed, in shards or on the meta device.
    """
    unreadable = not tensors or any(isinstance(t, fx.Proxy) or t.is_meta or hasattr(t, "full_tensor") for t in tensors)
    if unreadable or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    try:
        with torch.no_grad():
            values = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
            return torch.stack([number for t in values for number in (t.sum(), t.norm())]).tolist()
    except RuntimeError:  # torch.func.vmap, fake tensors
        return None


class Follows:
    """Mix-in of modules with buffers that follow from weights, a seed or a counter, and are right in averages too.

    Averages (EMA, SWA) are deep copies, into which means of weights are written, and means or copies of buffers. Such
    a copy recomputes its buffers when it is used or saved and what they follow from, or they, have changed since; so
    does a model before its first training step, whose weights another rank may have sent. A model in training has
    buffers as of its last update, and keeps them.
    """

    _seen: list[float] | None = None
    _trained = False

    def followed(self) -> list[Tensor]:
        """Return the buffers and what they follow from."""
        raise NotImplementedError

    def mark(self) -> None:
        """Take the buffers for right."""
        self._seen = fingerprint(*self.followed())

    def has_changed(self) -> bool:
        """Return whether the buffers are no longer right; in training they are as of the last update."""
        if self._trained or torch.compiler.is_compiling():
            return False
        return (now := fingerprint(*self.followed())) is not None and now != self._seen

    def follow(self, trains: bool = False) -> None:
        """Recompute the buffers if something has changed; training begins where it ``trains``."""
        if self.has_changed():
            self.refresh()
        if trains and not self._trained and not torch.compiler.is_compiling():
            self._trained = True

    def once(self, weight: Tensor, compute: Callable[[], Any], otherwise: Any) -> Any:
        """Return what ``compute`` finds, once for each weight; where it cannot be read, the last or ``otherwise``."""
        seen = fingerprint(weight)
        known, found = self.__dict__.get("_found_for", (None, otherwise))
        if seen is not None and known != seen:
            found = compute()
            self._found_for = (seen, found)
        return found

    def __deepcopy__(self, memo: dict) -> Follows:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._trained = False
        copied.mark()
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Follows:
        """Move and cast as ``nn.Module`` does, which changes the numbers by their rounding alone."""
        right = self._seen is not None and self._seen == fingerprint(*self.followed())
        super()._apply(fn, recurse)
        if right:
            self.mark()
        return self

    def _save_to_state_dict(self, *args) -> None:
        self.follow()
        super()._save_to_state_dict(*args)


class ShowsEffective:
    """Mix-in of modules whose parameters read as what they compute with, W + C, while their attention layer runs.

    Some attention layers call ``self.qkv(x)``, others compute with
    ``self.qkv.weight``. Names in ``shown`` are properties of a subclass: W for
    initialisers and everybody else outside, W + C from the hooks of
    :func:`show_while_running` on, and in the backward pass, where activation
    checkpointing runs parts of the layer again. ``parameters()`` and
    ``state_dict()`` always hold W. W + C is computed once in a run.
    """

    site = ""  # name in the model, for messages
    changes_function = True  # whether the same weights compute something else in the stock module
    shows_weight = True  # whether a parameter can stand for what the module does
    _runs = 0  # of the attention layer, nested

    def note(self) -> dict:
        """Return what the metadata of a state dict says of this module."""
        return dict(self.conditioning.settings(), layout=self.layout.as_dict())

    def own(self, name: str) -> Tensor | None:
        """Return the parameter W, whoever asks (a proxy under ``torch.fx`` tracing)."""
        # What is set in place of a removed parameter, as torch's pruning does, lies in __dict__.
        if name in self.__dict__ and name not in self._parameters:
            return self.__dict__[name]
        if "parametrizations" in self._modules:
            raise TypeError(
                f"{self.site or type(self).__name__}: a conditioned projection cannot be parametrised, since what "
                "reads its weight would lose C. Fold the model first."
            )
        return nn.Module.__getattr__(self, name)

    def effective(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return what the module computes with in the place of parameter ``name``, in ``dtype`` or that of W."""
        if not self._runs or torch.compiler.is_compiling() or isinstance(self.own(name), fx.Proxy):
            return self._effective(name, dtype)
        made = self.__dict__.setdefault("_made", {})
        key = (name, dtype or self.own(name).dtype, torch.is_grad_enabled())
        if key not in made:
            made[key] = self._effective(name, dtype)
        return made[key]

    def _effective(self, name: str, dtype: torch.dtype | None) -> Tensor:
        raise NotImplementedError

    def _may_be_recomputed(self, own: Tensor) -> bool:
        # FSDP asks every module for its `weight` in the backward pass, where it is a flat shard.
        return bool(self.site) and self.shows_weight and own.dim() > 1 and in_backward_pass()

    def _read(self, name: str) -> Tensor | None:
        own = self.own(name)
        if own is None or not (self._runs or isinstance(own, fx.Proxy) or self._may_be_recomputed(own)):
            return own
        if not self.shows_weight:
            raise TypeError(
                f"{self.site or type(self).__name__}: its attention layer computes with {name} instead of calling the "
                f"projection, which {self.conditioning} cannot follow. Leave the layer out with `exclude`, or use a "
                "correction such as IdentityCorrection."
            )
        return self.effective(name)


def shown(name: str) -> property:
    """Return the property that a subclass of :class:`ShowsEffective` has for its parameter ``name``."""

    def assign(module: nn.Module, value: object) -> None:
        module.__dict__[name] = value

    def remove(module: nn.Module) -> None:
        del module.__dict__[name]

    return property(lambda module: module._read(name), assign, remove)


def show_while_running(owner: nn.Module, children: Iterable[str]) -> None:
    """Let an attention layer read W + C from the projections below its ``children`` in its forward pass.

    The hooks look for the projections when they run: copies of the owner (EMA)
    use their own, adapters around a projection are looked into, and nothing
    happens where it was folded.
    """
    children = tuple(children)
    owner.register_forward_pre_hook(functools.partial(_show, children=children))
    owner.register_forward_hook(functools.partial(_hide, children=children), always_call=True)


def is_shown(owner: nn.Module) -> bool:
    """Return whether :func:`show_while_running` was called on ``owner``."""
    return any(_is_ours(hook) for hook in owner._forward_pre_hooks.values())


def stop_showing(owner: nn.Module) -> None:
    """Remove the hooks of :func:`show_while_running`."""
    for hooks in (owner._forward_pre_hooks, owner._forward_hooks):
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            del hooks[key]
            owner._forward_hooks_always_called.pop(key, None)


def _is_ours(hook: Callable) -> bool:
    return isinstance(hook, functools.partial) and hook.func in (_show, _hide)


def _below(owner: nn.Module, children: Iterable[str]) -> Iterator[ShowsEffective]:
    for child in children:
        yield from (module for module in getattr(owner, child).modules() if isinstance(module, ShowsEffective))


def _show(owner: nn.Module, inputs: tuple, children: tuple[str, ...]) -> None:
    for module in _below(owner, children):
        for name in module._modules.get("parametrizations", ()):
            module.own(name)  # raises
        module._runs += 1


def _hide(owner: nn.Module, inputs: tuple, outputs: object, children: tuple[str, ...]) -> None:
    for module in _below(owner, children):
        module._runs = max(module._runs - 1, 0)  # another hook before ours may have failed
        if not module._runs:
            module.__dict__.pop("_made", None)


class Projection(ShowsEffective, nn.Linear):
    """Base of the modules that take the place of an ``nn.Linear`` and hold its very parameters.

    ``weight`` and ``bias`` keep their names, so a stock state dict loads with
    ``strict=False`` and misses only the names that a subclass adds. How the
    projection was changed is written into the metadata of the state dict (which
    ``torch.save`` keeps), so that a loader can tell its weight from a stock one.

    A subclass names ``nn.Linear`` as a second base: mmengine's initialisers for
    ``layer='Linear'`` look at the name of the class and of its direct bases, and
    would silently pass over a grandchild.

    Raises:
        ValueError: The rows do not fit the layout.
    """

    weight = shown("weight")

    def __init__(self, linear: nn.Linear, conditioning: Conditioning, layout: ProjectionLayout) -> None:
        require_plain("", linear)
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layout.rows_per_head(linear.out_features)
        self.weight, self.bias = linear.weight, linear.bias
        self.conditioning = conditioning
        self.layout = layout
        self.targeted = [p for p, role in enumerate(layout.roles) if role in conditioning.targets]
        self.register_state_dict_post_hook(write_note)
        self.make_state()
        self.train(linear.training)

    def make_state(self) -> None:
        """Make what a subclass holds besides weight and bias, in the form of the present weight."""

    def refresh(self) -> None:
        """Recompute what follows from the weight."""

    def init_weights(self) -> None:
        """Follow a weight that was re-initialised; mmengine's ``BaseModule`` calls its children by this name."""
        self.refresh()

    def effective_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return what the tokens are multiplied with, [P * D, E], in ``dtype`` or that of the weight."""
        return self.effective("weight", dtype)

    def folded(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` with the effective weight and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        weight, own = self.effective_weight(), self.own("weight")
        kept = weight is own and isinstance(own, nn.Parameter)
        linear.weight = own if kept else nn.Parameter(weight.detach(), requires_grad=own.requires_grad)
        linear.bias = self.bias
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [..., E] to [..., P * D]."""
        if isinstance(x, fx.Proxy) and x.tracer.root is not self:
            return as_leaf(self, x)
        dtype = None if isinstance(x, fx.Proxy) else product_dtype(x)
        return F.linear(x, self.effective_weight(dtype), self.bias)

    def apply(self, fn: Callable[[nn.Module], None]) -> Projection:
        """Apply ``fn`` as ``nn.Module`` does; if it changed the weight, as initialisers do, state follows.

        mmengine's initialisers go through ``apply``, which also reaches the
        projections whose parents are no ``BaseModule``, such as XCiT's blocks.
        """
        if type(self).init_weights is Projection.init_weights and type(self).refresh is Projection.refresh:
            return super().apply(fn)
        before = self.own("weight").detach().clone()
        super().apply(fn)
        after = self.own("weight")
        same_form = (before.shape, before.dtype, before.device) == (after.shape, after.dtype, after.device)
        if same_form and not after.is_meta and not torch.equal(before, after):
            self.init_weights()
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as ``nn.Module`` does, also on assignment; a weight in place of one on the meta device gets state.

        So a layer can be built on that device and then given the parameters of a stock layer.
        """
        before = self._parameters.get(name)  # none while FullyShardedDataParallel exchanges it
        super().register_parameter(name, param)
        if name == "weight" and before is not None and before.is_meta and not param.is_meta and "layout" in vars(self):
            self.make_state()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, conditioning={self.conditioning}, layout={self.layout.as_dict()}"


def changed_function(name: str, trained: dict, own: dict) -> str:
    """Say that a weight is loaded under another conditioning than it was trained with."""
    return (
        f"{name} was trained with {trained} but is loaded into a projection with {own}, which changes what the model "
        "computes. Build the model with the file's `conditioning`, fold the file (tools/model_converters/fold.py), or "
        "load it by mmspectral.checkpoints.load_backbone."
    )


def write_note(module: ShowsEffective, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Hook that writes into a state dict how its weights are used."""
    if module.changes_function:
        local_metadata[METADATA_KEY] = module.note()

"""Mistakes in a config that can be seen before anything is built or written."""

import difflib
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import LOOPS, MODELS, OPTIMIZERS, DefaultScope, Registry
from torch import nn

from mmspectral.arguments import type_name
from mmspectral.errors import UsageError
from mmspectral.layers import build_conditioning

_LOOPS = {"train_cfg": "EpochBasedTrainLoop", "val_cfg": "ValLoop", "test_cfg": "TestLoop"}
_GIVEN_BY_RUNNER = ("type", "by_epoch")
_PARTS = ("backbone", "neck", "data_preprocessor")


def check_config(cfg: Config) -> None:
    """Refuse names that no class or argument has, and settings that no correction or optimizer takes.

    Raises:
        UsageError: What is wrong, where in the config, and what to write instead.
    """
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope")):
        for path, part in _parts(cfg.get("model"), "model"):
            for name, value in part.items():
                if name.endswith("conditioning"):
                    try:
                        build_conditioning(value)
                    except (KeyError, TypeError, ValueError) as error:
                        raise UsageError(f"{path}.{name}: {error.args[0]}") from error
            if path == "model" or path.rpartition(".")[2].partition("[")[0].endswith((*_PARTS, "head")):
                _check_names(path, part, MODELS)
        for name, default in _LOOPS.items():
            loop = cfg.get(name)
            if isinstance(loop, Mapping) and loop.get("by_epoch", True):
                _check_names(name, {"type": default, **loop}, LOOPS, _GIVEN_BY_RUNNER)
        optimizer = (cfg.get("optim_wrapper") or {}).get("optimizer")
        if isinstance(optimizer, Mapping):
            _check_optimizer("optim_wrapper.optimizer", optimizer)


def _parts(node: Any, path: str) -> Iterator[tuple[str, Mapping]]:
    """Yield the dicts of a model by their dotted names."""
    if isinstance(node, Mapping):
        yield path, node
        for name, value in node.items():
            yield from _parts(value, f"{path}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _parts(value, f"{path}[{index}]")


def _check_names(path: str, part: Mapping, registry: Registry, given: Collection[str] = ("type",)) -> None:
    kind = type_name(part)
    if not kind:
        return
    built = _find(path, part, registry)
    if kind.endswith("ConditionedModel"):
        _find(path, {"type": part.get("model_type")}, registry)
    accepted = _accepted(built)
    unknown = [name for name in part if accepted is not None and name not in {*accepted, *given, "_scope_"}]
    if unknown:
        hint = _instead(unknown[0], accepted)
        if path.endswith("backbone"):
            hint += " A backbone that replaces the one of a base config needs _delete_=True in its dict."
        raise UsageError(f"{path}: {kind} has no argument {', '.join(unknown)}.{hint}")


def _find(path: str, part: Mapping, registry: Registry) -> Any:
    """Return the class or function that a dict names."""
    kind = part["type"]
    if not isinstance(kind, str):
        return kind
    try:
        with registry.switch_scope_and_registry(None) as scoped:
            built = scoped.get(kind)
    except (KeyError, RuntimeError):
        built = None
    if built is None:
        raise UsageError(f"{path}.type is {kind!r}, which no package has.{_instead(kind, _names(registry))}")
    return built


def _names(registry: Registry) -> list[str]:
    children = [registry, *registry.children.values()]
    return [f"{child.scope}.{name}" for child in children for name in child.module_dict]


def _instead(name: str, known: Any) -> str:
    last = name.rpartition(".")[2]
    by_last = {other.rpartition(".")[2]: other for other in known}
    close = difflib.get_close_matches(last, by_last, n=1)
    return f" Did you mean {by_last[close[0]]}?" if close else ""


def _accepted(built: Any) -> set[str] | None:
    """Return the names of a function's or class's arguments; None where it takes any."""
    names: set[str] = set()
    owners = built.__mro__ if inspect.isclass(built) else ()
    makers = [vars(owner)["__init__"] for owner in owners if "__init__" in vars(owner)] or [built]
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            return names
    return None


def _check_optimizer(path: str, settings: Mapping) -> None:
    built = _find(path, settings, OPTIMIZERS)
    if not built.__module__.startswith("torch.optim"):  # others may need ranks
        return
    arguments = {name: value for name, value in settings.items() if name not in ("type", "_scope_")}
    try:
        built([nn.Parameter(torch.zeros(1))], **arguments)
    except (TypeError, ValueError) as error:
        strings = [f"{name}={value!r}" for name, value in arguments.items() if isinstance(value, str)]
        text = f" ({', '.join(strings)} is a string)" if strings else ""
        raise UsageError(f"{path}: {built.__name__} cannot be built: {error}{text}.") from error

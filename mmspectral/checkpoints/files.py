"""Read checkpoint files and find the weights in them; write such files in one step."""

import io
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from mmengine.logging import print_log
from torch import Tensor

from mmspectral.compat.atomic_write import write_atomically
from mmspectral.compat.checkpoints import load_from_local, load_from_source
from mmspectral.errors import DamagedCheckpointError

# Averaged weights first: they are the ones that were evaluated. mmengine's EMA hook stores the average under
# `state_dict` and what was not averaged under `ema_state_dict`.
EMA_ENTRIES = ("state_dict_ema", "model_ema")
ENTRIES = (*EMA_ENTRIES, "state_dict", "model", "ema_state_dict")
_BOOKKEEPING = ("steps", "n_averaged")  # counters of averaged models
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")
SAFETENSORS_METADATA = "mmspectral"


@dataclass
class Weights:
    """Tensors of a file by name, without the prefixes that wrappers of a model leave.

    Args:
        tensors: By name.
        metadata: What ``state_dict()`` notes about modules, by module name.
        entry: Key of the file under which they stood, or "" for the top.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, dict]
    entry: str = ""

    def under(self, prefix: str) -> "Weights":
        """Return those whose names begin with ``prefix`` ("" or ending in a dot), without it."""
        inside = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        metadata = {
            f"{name}.".removeprefix(prefix).removesuffix("."): entry
            for name, entry in self.metadata.items()
            if f"{name}.".startswith(prefix)
        }
        return Weights(inside, metadata, self.entry)

    def state_dict(self) -> OrderedDict[str, Tensor]:
        """Return them as ``Module.state_dict()`` would, metadata attached."""
        state = OrderedDict(self.tensors)
        state._metadata = OrderedDict(self.metadata)
        return state


def without_wrappers(name: str) -> str:
    """Return a name without ``module.`` in front and ``_orig_mod.`` anywhere (DDP, EMA, ``torch.compile``)."""
    return _WRAPPERS.sub("", name)


def read_checkpoint(source: str | os.PathLike, trust: bool | None = None) -> object:
    """Read a file, a URL or a name in mmengine's lists without running code from it.

    A file ending in ``.safetensors`` is read by the library of that name.

    Args:
        source: Path, URL or name.
        trust: Whether code in the file may be run; None is no, unless this
            process was given ``--trust-checkpoint``.

    Raises:
        FileNotFoundError: No such file.
        UnsafeCheckpointError: The file is a pickle that needs code.
        DamagedCheckpointError: The file is no checkpoint.
        UsageError: It cannot be downloaded.
    """
    return load_from_source(os.fspath(source), "cpu", trust, _read_file)


def _read_file(path: str, map_location: str, trust: bool) -> object:
    return _read_safetensors(path) if path.endswith(".safetensors") else load_from_local(path, map_location, trust)


def find_weights(loaded: object, source: str, entry: str | None = None) -> Weights:
    """Find the state dict in a checkpoint.

    Args:
        loaded: What was read.
        source: Its name, for messages.
        entry: Key under which it stands; None takes averaged weights where a
            file of another code base has them, else ``state_dict`` or ``model``.

    Raises:
        ValueError: There is none, or not under ``entry``.
    """
    chosen = ""
    if entry is not None:
        if not isinstance(loaded, Mapping) or not isinstance(loaded.get(entry), Mapping):
            raise ValueError(f"{source} holds no state dict under {entry!r}; found {_keys(loaded)}.")
        chosen, loaded = entry, loaded[entry]
    while isinstance(loaded, Mapping):
        inner = next((key for key in ENTRIES if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            break
        chosen, loaded = inner, loaded[inner]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(
            f"{source} holds no state dict: expected tensors by name, at the top or under "
            f"{', '.join(map(repr, ENTRIES))}, found {_keys(loaded)}."
        )
    if odd := [name for name in loaded if not isinstance(name, str)]:
        raise ValueError(f"{source}: a name of the state dict is no string but {odd[0]!r}.")
    tensors = {
        without_wrappers(name): value
        for name, value in loaded.items()
        if isinstance(value, Tensor) and name not in _BOOKKEEPING
    }
    if odd := [name for name, tensor in tensors.items() if tensor.layout != torch.strided or tensor.is_quantized]:
        raise ValueError(f"{source}: {odd[0]} is sparse or quantized; weights must be plain tensors.")
    metadata = getattr(loaded, "_metadata", {})
    if not isinstance(metadata, Mapping) or not all(
        isinstance(name, str) and isinstance(entry, Mapping) for name, entry in metadata.items()
    ):
        raise ValueError(f"{source} is damaged: the metadata of its state dict is no dict of dicts by name.")
    return Weights(tensors, {without_wrappers(f"{n}.").removesuffix("."): e for n, e in metadata.items()}, chosen)


def write_checkpoint(checkpoint: Mapping, path: Path, force: bool = False) -> None:
    """Write a checkpoint completely or not at all.

    Args:
        checkpoint: With a state dict under one of :data:`ENTRIES`; only this,
            with its metadata, goes into a file ending in ``.safetensors``.
        path: The file; its folder is made.
        force: Whether a file that is there is replaced.

    Raises:
        FileExistsError: The file is there and ``force`` is False.
        FileWriteError: The disk is full, or the folder cannot be written.
    """
    if path.exists() and not force:
        raise FileExistsError(f"{path} is there already; choose another name or pass --force.")
    if path.suffix == ".safetensors":
        if "meta" in checkpoint:
            print_log(f"{path}: a safetensors file holds tensors and corrections only; `meta` is left out.", "current")
        content = _safetensors(next(checkpoint[key] for key in ENTRIES if key in checkpoint))
    else:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        content = buffer.getbuffer()
    write_atomically(content, path, overwrite=force)


def _read_safetensors(source: str) -> OrderedDict[str, Tensor]:
    from safetensors import SafetensorError, safe_open  # an optional dependency

    if not Path(source).expanduser().is_file():
        raise FileNotFoundError(f"There is no checkpoint {source}.")
    try:
        with safe_open(Path(source).expanduser(), framework="pt") as file:
            state = OrderedDict((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            notes = (file.metadata() or {}).get(SAFETENSORS_METADATA)
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{source} is no safetensors file, or is damaged: {error}") from error
    if notes:
        try:
            state._metadata = OrderedDict(json.loads(notes))
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{source} is damaged: its metadata {SAFETENSORS_METADATA!r} is no JSON dict."
            ) from error
    return state


def _safetensors(state: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    notes = {name: entry for name, entry in getattr(state, "_metadata", {}).items() if set(entry) - {"version"}}
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}  # it takes no shared ones
    return save(tensors, metadata={"format": "pt", **({SAFETENSORS_METADATA: json.dumps(notes)} if notes else {})})


def _keys(loaded: object) -> str:
    return ", ".join(map(str, list(loaded)[:8])) if isinstance(loaded, Mapping) else type(loaded).__name__

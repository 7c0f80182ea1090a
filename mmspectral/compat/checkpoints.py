"""Read checkpoints without running the code that a pickle may hold.

mmengine's checkpoints hold more than tensors: its log buffers and numpy
scalars. torch reads these with ``weights_only=True`` once they are on its
allow-list. The original mmengine does not put them there, so that it cannot
resume on torch >= 2.6. The fork does, but its list has ``getattr``, which
reaches every builtin function, and it reads a file that is still refused a
second time without protection. So the loaders are replaced here.
"""

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from mmengine.dist import get_dist_info
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

from mmspectral.compat.checkpoint_damage import find_damage
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError, UsageError

FORCE_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORCE_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_ZIP = b"PK\x03\x04"  # how torch, too, tells its files from those of before 1.6


def _statistics_method(owner: type, name: str) -> Callable:
    """Stand in for ``getattr`` in the pickle of a :class:`HistoryBuffer`, whose state names its own methods."""
    if owner is not HistoryBuffer or name not in ("min", "max", "current", "mean"):
        raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) is not part of an mmengine log buffer")
    return getattr(HistoryBuffer, name)


def _under_name(path: str, function: Callable) -> Callable:
    """Wrap ``function`` so that torch finds it under ``path``, in every torch that has an allow-list."""

    def stand_in(*args):
        return function(*args)

    stand_in.__module__, _, stand_in.__name__ = path.rpartition(".")
    stand_in.__qualname__ = stand_in.__name__
    return stand_in


_multiarray = (np._core if hasattr(np, "_core") else np.core).multiarray

# What mmengine's Runner saves besides tensors and plain values. numpy 1 and numpy 2 write different paths for the same
# two functions.
SAFE_GLOBALS = (
    HistoryBuffer,
    _under_name("builtins.getattr", _statistics_method),
    np.ndarray,
    np.dtype,
    *(type(np.dtype(name)) for name in ("bool", "int32", "int64", "uint8", "uint32", "float32", "float64")),
    *(
        _under_name(f"numpy.{core}.multiarray.{function.__name__}", function)
        for function in (_multiarray._reconstruct, _multiarray.scalar)
        for core in ("core", "_core")
    ),
)


def allow_mmengine_checkpoints() -> None:
    """Put :data:`SAFE_GLOBALS` on torch's allow-list, for this process."""
    torch.serialization.add_safe_globals(list(SAFE_GLOBALS))


def load_from_local(filename: str, map_location: Any = None, trust: bool = False) -> dict:
    """Read a local checkpoint, ``~`` being the home folder, to ``map_location``; run code from it only with ``trust``.

    Raises:
        FileNotFoundError: No such file.
        UnsafeCheckpointError: The file holds more than tensors, plain values
            and mmengine's log buffers.
        DamagedCheckpointError: The file is damaged, or no checkpoint. A flipped
            bit is found in files of torch >= 1.6, which have checksums.
    """
    path = Path(filename).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {filename}.")
    with path.open("rb") as file:
        beginning = file.read(len(_ZIP))
    if beginning == _ZIP and (damage := find_damage(path)):
        raise DamagedCheckpointError(f"{filename} is damaged: {damage}. Copy or download it again, or take another.")
    allow_mmengine_checkpoints()
    try:
        with _environment(FORCE_UNSAFE if trust else FORCE_SAFE):
            return torch.load(path, map_location=map_location, weights_only=not trust)
    except pickle.UnpicklingError as error:
        if beginning != _ZIP and beginning[:1] != b"\x80" and "GLOBAL" not in str(error):  # such as a web page
            raise DamagedCheckpointError(f"{filename} is no checkpoint.") from error
        raise UnsafeCheckpointError(
            f"{filename} is not read, because reading it may run code from it ({refusal_reason(error)}). "
            "Pass --trust-checkpoint if you trust where the file comes from."
        ) from error
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # torch stumbles over damaged bytes in as many ways as there are: IndexError, KeyError
        raise DamagedCheckpointError(
            f"{filename} cannot be read as a checkpoint, it may be damaged: {error}"
        ) from error


def refusal_reason(error: pickle.UnpicklingError) -> str:
    """Return the part of torch's refusal that is about the file; the rest names switches that are not ours."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found:
        return f"it names {found[1]}, which is neither a tensor nor plain data"
    return str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or "it is damaged"


def load_from_source(
    source: str, map_location: Any = None, trust: bool | None = None, read: Callable = load_from_local
) -> Any:
    """Read a checkpoint that is a local file, on the web, or in one of mmengine's lists, such as ``openmmlab://``.

    Downloads are kept in torch's cache, where a damaged one does not stay.

    Args:
        source: Path, URL or name.
        map_location: As in ``torch.load``.
        trust: Whether code that the file holds is run; None is what
            :func:`use_trusting_loading` or :func:`use_safe_loading` said, and no.
        read: Reads a local file, with the arguments of :func:`load_from_local`.

    Raises:
        UnsafeCheckpointError, DamagedCheckpointError, FileNotFoundError: As for :func:`load_from_local`.
        UsageError: The file cannot be downloaded.
    """
    trust = _trusted if trust is None else trust
    scheme, separator, name = source.partition("://")
    if not separator:
        return read(source, map_location, trust)
    url = _listed(scheme, name) if scheme in _LISTS else source
    if not url.startswith(("http://", "https://")):
        if not trust:
            raise UnsafeCheckpointError(
                f"{source} is not read, because mmengine's loader of {scheme}:// may run code from it. Copy the file "
                "to this machine, or pass --trust-checkpoint if you trust where it comes from."
            )
        loader = next(loader for prefix, loader in _mmengine_loaders.items() if re.match(prefix, source))
        with _environment(FORCE_UNSAFE):
            return loader(source, map_location)
    rank, ranks = get_dist_info()
    try:
        if rank == 0:
            _download(url)
    finally:
        if ranks > 1:
            torch.distributed.barrier()
    path = _download(url)
    try:
        loaded = read(str(path), map_location, trust)
    except DamagedCheckpointError as error:
        path.unlink(missing_ok=True)
        raise DamagedCheckpointError(f"{url} came damaged and is not kept; try again. {error}") from error
    return mmengine_checkpoint._process_mmcls_checkpoint(loaded) if scheme == "mmcls" else loaded


_LISTS = {  # of names, by scheme; the values of each list are URLs
    **dict.fromkeys(("torchvision", "modelzoo"), mmengine_checkpoint.get_torchvision_models),
    **dict.fromkeys(("open-mmlab", "openmmlab"), mmengine_checkpoint.get_external_models),
    "mmcls": mmengine_checkpoint.get_mmcls_models,
}
_HASH = re.compile(r"-([0-9a-f]{8,})\.\w+$")  # beginning of the SHA-256, in the names that torch and OpenMMLab publish


def _listed(scheme: str, name: str) -> str:
    urls = _LISTS[scheme]()
    name = mmengine_checkpoint.get_deprecated_model_names().get(name, name)
    if name not in urls:
        raise UsageError(f"mmengine's list for {scheme}:// has no {name}.")
    return urls[name]


def _download(url: str) -> Path:
    """Return the file of a URL in torch's cache, where :func:`torch.hub.load_state_dict_from_url` has it, too."""
    try:
        path = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
        if path.is_file():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        stated = _HASH.search(path.name)
        torch.hub.download_url_to_file(url, str(path), stated and stated[1], progress=sys.stderr.isatty())
    except (OSError, HTTPException, ValueError) as error:
        raise UsageError(f"{url} cannot be downloaded: {error}.") from error
    except RuntimeError as error:
        raise DamagedCheckpointError(f"{url} came damaged and is not kept; try again: {error}.") from error
    return path


@contextlib.contextmanager
def _environment(switch: str) -> Iterator[None]:
    """Set one of torch's two switches, which would overrule our arguments, for as long as a file is read."""
    before = {name: os.environ.pop(name, None) for name in (FORCE_SAFE, FORCE_UNSAFE)}
    os.environ[switch] = "1"
    try:
        yield
    finally:
        del os.environ[switch]
        os.environ.update({name: value for name, value in before.items() if value is not None})


_mmengine_loaders = dict(CheckpointLoader._schemes)
_trusted = False  # what this process was told; an environment variable could be inherited


def use_safe_loading() -> None:
    """Make mmengine and torch read checkpoints in safe mode, here and in child processes.

    The line that makes mmpretrain's ``get_model`` and mmdet's ``init_detector`` refuse a checkpoint that holds code.
    """
    _set_loading(FORCE_SAFE)


def use_trusting_loading() -> None:
    """Let checkpoints run code when they are read in this process."""
    # The original mmengine does not say how to load, and torch >= 2.6 then refuses.
    _set_loading(FORCE_UNSAFE)


def _set_loading(switch: str) -> None:
    global _trusted
    _trusted = switch == FORCE_UNSAFE
    allow_mmengine_checkpoints()
    for name in (FORCE_SAFE, FORCE_UNSAFE):
        os.environ.pop(name, None)
    os.environ[switch] = "1"
    CheckpointLoader.register_scheme(list(_mmengine_loaders), loader=load_from_source, force=True)

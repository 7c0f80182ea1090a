"""Read checkpoints without running the code that a pickle may hold.

mmengine's checkpoints hold more than tensors: its log buffers and numpy
scalars. torch reads these with ``weights_only=True`` once they are on its
allow-list. The original mmengine does not put them there, so that it cannot
resume on torch >= 2.6. The fork does, but its list has ``getattr``, which
reaches every builtin function, and it reads a file that is still refused a
second time without protection. So the loaders are replaced here.
"""

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

from mmspectral.compat.checkpoint_damage import find_damage
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError

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


def load_from_local(filename: str, map_location: Any = None) -> dict:
    """Read a local checkpoint, ``~`` being the home folder, to ``map_location``; never run code from it.

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
        has_checksums = file.read(len(_ZIP)) == _ZIP
    if has_checksums and (damage := find_damage(path)):
        raise DamagedCheckpointError(f"{filename} is damaged: {damage}. Copy or download it again, or take another.")
    allow_mmengine_checkpoints()
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refusal(filename, error) from error
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


def _refusal(filename: str, error: pickle.UnpicklingError) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"{filename} is not read, because reading it may run code from it ({refusal_reason(error)}). "
        "Pass --trust-checkpoint if you trust where the file comes from."
    )


def load_from_http(filename: str, map_location: Any = None) -> dict:
    """Download a checkpoint and read it; runs no code from it once :func:`use_safe_loading` was called.

    Raises:
        UnsafeCheckpointError: As for :func:`load_from_local`.
    """
    try:
        return mmengine_checkpoint.load_from_http(filename, map_location)
    except pickle.UnpicklingError as error:
        raise _refusal(filename, error) from error


def use_safe_loading() -> None:
    """Make mmengine and torch read checkpoints in safe mode, here and in child processes."""
    allow_mmengine_checkpoints()
    os.environ.pop(FORCE_UNSAFE, None)
    os.environ[FORCE_SAFE] = "1"
    CheckpointLoader.register_scheme("", loader=load_from_local, force=True)
    CheckpointLoader.register_scheme(("http://", "https://"), loader=load_from_http, force=True)


def use_trusting_loading() -> None:
    """Let checkpoints run code when they are read, here and in child processes."""
    os.environ.pop(FORCE_SAFE, None)
    # The original mmengine does not say how to load, and torch >= 2.6 then refuses.
    os.environ[FORCE_UNSAFE] = "1"
    CheckpointLoader.register_scheme("", loader=mmengine_checkpoint.load_from_local, force=True)
    CheckpointLoader.register_scheme(("http://", "https://"), loader=mmengine_checkpoint.load_from_http, force=True)

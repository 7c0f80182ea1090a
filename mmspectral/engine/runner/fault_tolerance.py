"""What lets a run be killed, resumed and trusted; tools/train.py uses it unless a config says otherwise."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mmcv.transforms
import mmengine.hooks
from mmengine.config import Config, ConfigDict

from mmspectral.errors import UsageError

HOOKS = ("mmspectral.ResumeCheckHook", "mmspectral.EpochSeedHook", "mmspectral.DueValidationHook")
IMAGE_LOADER = "mmspectral.datasets.image_loading.LoadImageFromFile"


def make_fault_tolerant(cfg: Config) -> None:
    """Put the parts of this package where the config has mmengine's, or none; changes ``cfg`` in place.

    - The checkpoint hook, where it is mmengine's, becomes
      :class:`mmspectral.engine.hooks.checkpoint_hook.CheckpointHook`, and
      early stopping
      :class:`mmspectral.engine.hooks.early_stopping.EarlyStoppingHook`, settings
      kept.
    - :data:`HOOKS` join ``custom_hooks`` unless they are there. One of them seeds
      the random numbers at the start of each epoch, so that figures differ, as
      those of two seeds do, from a run without it.
    - Workers of the training data end with the epoch.
    - Training images are read by
      :class:`mmspectral.datasets.image_loading.LoadImageFromFile`.

    The config that the run writes to its folder has all this, so OpenMMLab's own
    ``tools/train.py`` does the same with that one.

    ``fault_tolerance = False`` in the config, or ``--cfg-options
    fault_tolerance=False``, leaves everything as it is; so does ``runner_type``:
    the FlexibleRunner writes its checkpoints by its strategy. One part is left
    alone where its type is written with its scope: ``mmengine.CheckpointHook``,
    ``mmcv.LoadImageFromFile``. ``fault_tolerance = dict(...)`` may set
    ``tolerated_failures`` of the checkpoint hook and ``skip_unreadable`` of the
    image loader, so that training outlives a full disk or a damaged image.

    A hook that keeps its state in itself forgets it when the run is resumed.

    Raises:
        UsageError: ``fault_tolerance`` has other settings, or stands beside ``runner_type``.
    """
    settings = cfg.get("fault_tolerance", {})
    if settings is False:
        return
    if "runner_type" in cfg:
        if "fault_tolerance" in cfg:
            raise UsageError(f"fault_tolerance is for mmengine's Runner; runner_type={cfg.runner_type!r} goes without.")
        return
    if not isinstance(settings, dict):
        raise UsageError(f"fault_tolerance is False or a dict of settings, not {settings!r}.")
    settings = dict(settings)
    saving = _pick(settings, "tolerated_failures")
    loading = _pick(settings, "skip_unreadable")
    if settings:
        raise UsageError(
            f"fault_tolerance has no setting {', '.join(map(repr, settings))}; it is False, or a dict of "
            "tolerated_failures (a number of saves) and skip_unreadable (True or False)."
        )
    default_hooks = ConfigDict(cfg.get("default_hooks") or {})
    checkpoint = default_hooks.get("checkpoint", ConfigDict(type="CheckpointHook"))  # what the Runner has without one
    if checkpoint is not None and _is_stock(checkpoint, mmengine.hooks.CheckpointHook):
        default_hooks.checkpoint = ConfigDict(checkpoint, type="mmspectral.CheckpointHook", **saving)
        cfg.default_hooks = default_hooks
    present = list(cfg.get("custom_hooks") or [])
    for index, hook in enumerate(present):
        if _is_stock(hook, mmengine.hooks.EarlyStoppingHook):
            present[index] = ConfigDict(hook, type="mmspectral.EarlyStoppingHook")
    names = [hook.get("type") for hook in present if isinstance(hook, dict)]
    cfg.custom_hooks = present + [ConfigDict(type=name) for name in HOOKS if name not in names]
    loader = cfg.get("train_dataloader")
    if isinstance(loader, dict):
        if "persistent_workers" in loader:
            loader["persistent_workers"] = False
        for node in _dicts(loader.get("dataset")):
            if _is_stock(node, mmcv.transforms.LoadImageFromFile):
                node.update(loading, type=IMAGE_LOADER)


def _pick(settings: dict, name: str) -> dict:
    """Take one setting out, as a dict that has it or has nothing."""
    return {name: settings.pop(name)} if name in settings else {}


def _is_stock(node: object, kind: type) -> bool:
    """Whether ``node`` is the config of ``kind``, by its name alone or, in a config of Python imports, the class."""
    return isinstance(node, dict) and node.get("type") in (kind.__name__, kind)


def _dicts(node: object) -> Iterator[dict]:
    """Yield every dict below ``node``."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _dicts(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _dicts(value)


def require_writable(folder: str) -> None:
    """Raise :class:`UsageError` if no file can be made in ``folder``, which is made where it is missing."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"The work folder {Path(folder).absolute()} cannot be written: {error.strerror}. "
            "Name another one by --work-dir."
        ) from error

"""Build mmengine's Runner for the machine at hand, and run it."""

import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mmspectral.engine.resume import choose_checkpoint
from mmspectral.errors import UsageError

# Where each launcher says what torch reads as RANK, WORLD_SIZE and LOCAL_RANK; torchrun sets these itself.
_LAUNCHER_VARIABLES = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def launch_run(cfg: Config, run: Callable[[Runner], Any], notes: Sequence[str] = ()) -> Any:
    """Build the Runner on this process's device, hand it to ``run`` and leave the process group.

    Lines that mmengine logs for each parameter are left out unless ``log_level`` is ``"DEBUG"``.

    Args:
        cfg: Config of the run, with ``launcher`` and ``work_dir``; it is adapted by
            :func:`mmspectral.engine.resume.choose_checkpoint` and, without an
            accelerator, by :func:`adapt_to_cpu`.
        run: What to do, such as ``Runner.train``.
        notes: Lines to log as warnings first.

    Returns:
        What ``run`` returns.

    Raises:
        UsageError: The launcher's environment variables are missing, the work
            folder cannot be written, or the checkpoint cannot be used.
    """
    require_writable(cfg.work_dir)
    notes = [*notes, *choose_checkpoint(cfg)]
    if get_device() == "cpu":
        notes += adapt_to_cpu(cfg)
        if cfg.launcher != "none":
            init_cpu_process_group(cfg.launcher, cfg.get("env_cfg", {}).get("dist_cfg"))
    try:
        runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
        if not runner.logger.isEnabledFor(logging.DEBUG):
            runner.logger.addFilter(_Brief())
        _fit_checkpoints(runner)
        for note in notes:
            runner.logger.warning(note)
        return run(runner)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


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


def runtime_notes(cfg: Config) -> list[str]:
    """Return a line that says what is off in a training whose config does not name the hooks of ``_base_/runtime.py``.

    Raises:
        UsageError: The config has ``fault_tolerance``, which earlier versions of this package read.
    """
    if "fault_tolerance" in cfg:
        raise UsageError(
            "fault_tolerance is not read any more. Inherit mmspectral::_base_/runtime.py, and set "
            "default_hooks.checkpoint.tolerated_failures and skip_unreadable of LoadImageFromFile in the pipeline."
        )
    hooks = cfg.get("default_hooks") or {}
    named = [str((hook or {}).get("type")).rpartition(".")[2] for name, hook in hooks.items() if name != "checkpoint"]
    off = [] if {"EpochSeedHook", "ResumeCheckHook", "DueValidationHook"} <= set(named) else ["exact resume"]
    if (hooks.get("checkpoint") or {}).get("type") != "mmspectral.CheckpointHook":
        off.append("atomic checkpoints")
    if not off or "runner_type" in cfg:
        return []
    return [
        f"Off in this config: {', '.join(off)}. To turn on: "
        '_base_ = [..., "mmspectral::_base_/runtime.py"]; default_hooks = _base_.exact_resume. This does not cover '
        "the state of early stopping (use mmspectral.EarlyStoppingHook) and of data loaders (set "
        "persistent_workers=False; the first transform is _base_.image_loader)."
    ]


def init_cpu_process_group(launcher: str, dist_cfg: dict | None = None) -> None:
    """Join this process to a gloo group of CPU processes; mmengine calls ``torch.cuda.set_device`` for any backend.

    Args:
        launcher: ``"pytorch"``, ``"slurm"`` or ``"mpi"`` (Open MPI).
        dist_cfg: The config's ``env_cfg.dist_cfg``, of which the ``timeout`` (seconds) is used.

    Raises:
        UsageError: The launcher's environment variables are missing.
    """
    variables = _LAUNCHER_VARIABLES[launcher]
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise UsageError(
            f"--launcher {launcher} needs the environment of that launcher, but {', '.join(missing)} is not set; "
            "start with tools/dist_train.sh or tools/slurm_train.sh, or leave --launcher out for one process."
        )
    for name, variable in zip(_LAUNCHER_VARIABLES["pytorch"], variables, strict=True):
        os.environ[name] = os.environ[variable]
    if launcher == "slurm" and "MASTER_ADDR" not in os.environ:
        hosts = subprocess.check_output(["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]], text=True)
        os.environ["MASTER_ADDR"] = hosts.split()[0]
    os.environ.setdefault("MASTER_PORT", "29500")
    if "MASTER_ADDR" not in os.environ:
        raise UsageError(f"--launcher {launcher} needs MASTER_ADDR, the address of the machine with rank 0.")
    timeout = (dist_cfg or {}).get("timeout")
    dist.init_process_group("gloo", timeout=None if timeout is None else timedelta(seconds=timeout))


def adapt_to_cpu(cfg: Config) -> list[str]:
    """Replace what needs an accelerator: mixed precision and, among ranks, SyncBN and mmengine's choice of a device.

    Returns:
        One sentence for each thing that is not as the config says.
    """
    notes = []
    if _replace(cfg.get("optim_wrapper"), ("AmpOptimWrapper",), "OptimWrapper", ("loss_scale", "dtype", "use_fsdp")):
        notes.append("Mixed precision needs a GPU: AmpOptimWrapper was replaced by OptimWrapper (float32).")
    if cfg.get("launcher", "none") == "none":
        return notes
    wrapper = dict(broadcast_buffers=False, find_unused_parameters=cfg.get("find_unused_parameters", False))
    # mmengine would fill in the number of a GPU.
    cfg.model_wrapper_cfg = {**wrapper, **(cfg.get("model_wrapper_cfg") or {}), "device_ids": None}
    if _replace(cfg.get("model"), ("SyncBN", "MMSyncBN"), "BN") | (cfg.pop("sync_bn", None) is not None):
        notes.append("SyncBN needs a GPU: it was replaced by BN, with statistics of each process.")
    return notes


def _replace(node: Any, types: tuple[str, ...], replacement: str, without: tuple[str, ...] = ()) -> bool:
    """Replace a ``type`` here and below, and drop what else only it takes; return whether there was any."""
    if isinstance(node, (list, tuple)):
        return sum(_replace(child, types, replacement, without) for child in node) > 0
    if not isinstance(node, dict):
        return False
    found = _replace(list(node.values()), types, replacement, without)
    kind = node.get("type")
    if (kind if isinstance(kind, str) else getattr(kind, "__name__", "")).rpartition(".")[2] not in types:
        return found
    node["type"] = replacement
    for name in without:
        node.pop(name, None)
    return True


def _fit_checkpoints(runner: Runner) -> None:
    """Let the runner load weights by the loader that ``init_cfg`` uses, unless the config's hooks say how."""
    from mmspectral.engine.hooks.checkpoint_fitting import CheckpointFittingHook  # needs mmpretrain

    if not any(isinstance(hook, CheckpointFittingHook) for hook in runner.hooks):
        runner.register_hook(CheckpointFittingHook())


class _Brief(logging.Filter):
    """Drop the lines that mmengine logs for each parameter: options of the optimizer and initialisation."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.funcName != "_dump_init_info" and not str(record.msg).startswith("paramwise_options")

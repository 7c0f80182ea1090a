"""Build mmengine's Runner for the machine at hand, and run it."""

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import broadcast_object_list, init_dist, is_main_process
from mmengine.logging import MMLogger, print_log
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from mmengine.utils.dl_utils import set_multi_processing

from mmspectral.engine.resume import choose_checkpoint
from mmspectral.engine.work_folder import locked
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError, UsageError

_GLANCE = 10.0  # seconds from one look at the launcher to the next
_REFUSALS = (UsageError, DamagedCheckpointError, UnsafeCheckpointError)
# Where each launcher says what torch reads as RANK, WORLD_SIZE and LOCAL_RANK; torchrun sets these itself.
_LAUNCHER_VARIABLES = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def launch_run(cfg: Config, run: Callable[[Runner], Any], notes: Sequence[str] = (), exclusive: bool = False) -> Any:
    """Build the Runner on this process's device, hand it to ``run`` and leave the process group.

    Lines that mmengine logs for each parameter are left out unless ``log_level`` is ``"DEBUG"``. Python's warnings go
    to the log. A refused config leaves no folder behind, and a rank ends within a minute of losing torch's launcher.

    Args:
        cfg: Config of the run, with ``launcher`` and ``work_dir``; it is adapted by
            :func:`mmspectral.engine.resume.choose_checkpoint` and, without an
            accelerator, by :func:`adapt_to_cpu`.
        run: What to do, such as ``Runner.train``.
        notes: Lines to log as warnings first.
        exclusive: Whether no other exclusive run may use the work folder meanwhile.

    Returns:
        What ``run`` returns.

    Raises:
        UsageError: The launcher's environment variables are missing, the work
            folder cannot be written or is in use, or the checkpoint cannot be used.
        KeyboardInterrupt: With a sentence that says how to continue.
    """
    on_cpu = get_device() == "cpu"
    notes = [*notes, *(adapt_to_cpu(cfg) if on_cpu else [])]
    if cfg.launcher != "none" and "runner_type" not in cfg:  # a FlexibleRunner's strategy joins the ranks itself
        env_cfg = cfg.get("env_cfg", {})
        if on_cpu:
            init_cpu_process_group(cfg.launcher, env_cfg.get("dist_cfg"))
        else:
            set_multi_processing(**env_cfg.get("mp_cfg", {}), distributed=True)
            init_dist(cfg.launcher, **env_cfg.get("dist_cfg", {}))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()
    runner = None
    with ExitStack() as stack:
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        stack.enter_context(_no_traces(cfg, lambda: runner))
        require_writable(cfg.work_dir)
        if exclusive:
            notes += _lock(stack, cfg)
        notes += choose_checkpoint(cfg)
        stack.enter_context(_warnings_in_log())
        try:
            runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
            if not runner.logger.isEnabledFor(logging.DEBUG):
                runner.logger.addFilter(_Brief())
            _fit_checkpoints(runner)
            for note in notes:
                runner.logger.warning(note)
            return run(runner)
        except KeyboardInterrupt:
            how = " The same command with --resume continues the run." if exclusive else ""
            raise KeyboardInterrupt(f"Interrupted.{how}") from None


def _lock(stack: ExitStack, cfg: Config) -> list[str]:
    """Lock the work folder on the first rank, whose refusal ends all; return what is to be logged."""
    refusal, note = None, None
    if cfg.launcher == "none" or os.environ.get(_LAUNCHER_VARIABLES[cfg.launcher][0]) == "0":
        try:
            note = stack.enter_context(locked(cfg.work_dir))
        except UsageError as error:
            refusal = str(error)
    answers = [refusal]
    broadcast_object_list(answers)
    if answers[0] is not None:
        raise UsageError(answers[0])
    return [] if note is None else [note]


def _end_without(launcher: int) -> None:
    """End this process once its parent is gone: nobody else would, and a resumed run would find the folder in use."""
    while os.getppid() == launcher:
        time.sleep(_GLANCE)
    print("The launcher of this rank is gone; it ends.", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def _no_traces(cfg: Config, built: Callable[[], Runner | None]) -> Iterator[None]:
    """Remove what a run that was refused before it began has put into its work folder, a log or nothing."""
    folder = cfg.work_dir
    before = os.listdir(folder) if os.path.isdir(folder) else None
    try:
        yield
    except Exception as error:
        runner = built()
        refused = runner is None or (isinstance(error, _REFUSALS) and runner.iter == 0)
        if refused and is_main_process() and os.path.isdir(folder):
            log = MMLogger.get_current_instance().instance_name[-15:]  # mmengine's time stamp
            if re.fullmatch(r"\d{8}_\d{6}", log) and log not in (before or ()):
                shutil.rmtree(os.path.join(folder, log), ignore_errors=True)
            with suppress(OSError):
                if before is None:
                    Path(folder, os.path.basename(cfg.filename or "?")).unlink(missing_ok=True)
                    os.rmdir(folder)
        raise


@contextmanager
def _warnings_in_log() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_log(str(message), "current", logging.WARNING)
        yield


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

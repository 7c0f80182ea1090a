"""Build mmengine's Runner for the machine at hand, and run it."""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mmspectral.arguments import require_checkpoint
from mmspectral.engine.runner.cpu_ddp import init_cpu_process_group, replace_sync_norm, use_cpu_wrapper
from mmspectral.engine.runner.resume import choose_checkpoint
from mmspectral.errors import UsageError

_AMP_ONLY = ("loss_scale", "dtype", "use_fsdp")


def enable_amp(cfg: Config) -> None:
    """Train in mixed precision with dynamic loss scaling; changes ``cfg`` in place."""
    cfg.optim_wrapper.type = "AmpOptimWrapper"
    cfg.optim_wrapper.loss_scale = "dynamic"


def enable_lr_scaling(cfg: Config) -> None:
    """Scale the learning rate with the real batch size; changes ``cfg`` in place.

    Raises:
        UsageError: The config does not say for which batch size its learning
            rate is.
    """
    if "base_batch_size" not in (cfg.get("auto_scale_lr") or {}):
        raise UsageError(
            "--auto-scale-lr needs the batch size that the config's learning rate is meant for: "
            "add auto_scale_lr = dict(base_batch_size=..., enable=False) to the config."
        )
    cfg.auto_scale_lr.enable = True


def set_resume(cfg: Config, checkpoint: str) -> None:
    """Continue a run; changes ``cfg`` in place.

    Args:
        cfg: Config of the run.
        checkpoint: Path or URL, or ``"auto"`` for the newest whole checkpoint in
            the work folder, if there is one
            (:func:`mmspectral.engine.runner.resume.choose_checkpoint`).

    Raises:
        UsageError: There is no such file.
    """
    if checkpoint != "auto":
        require_checkpoint(checkpoint)
    cfg.resume = True
    cfg.load_from = None if checkpoint == "auto" else checkpoint


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
        '_base_ = [..., "mmspectral::_base_/runtime.py"]; default_hooks = _base_.exact_resume'
    ]


def prepare_cfg_for_device(cfg: Config) -> list[str]:
    """Adapt a config to a machine without an accelerator; changes ``cfg`` in place.

    Mixed precision needs one, and so do SyncBN and mmengine's choice of a DDP
    device. With an accelerator nothing changes.

    Returns:
        One sentence for each thing that is not as the config says.
    """
    if get_device() != "cpu":
        return []
    notes = []
    if _replace_amp(cfg.get("optim_wrapper")):
        notes.append("Mixed precision needs a GPU: AmpOptimWrapper was replaced by OptimWrapper (float32).")
    if cfg.get("launcher", "none") != "none":
        use_cpu_wrapper(cfg)
        if replace_sync_norm(cfg):
            notes.append("SyncBN needs a GPU: it was replaced by BN, with statistics of each process.")
    return notes


def _replace_amp(wrapper: Any) -> bool:
    """Replace AmpOptimWrapper here and in the wrappers below, of which there are several with several optimizers."""
    if not isinstance(wrapper, dict):
        return False
    found = sum(map(_replace_amp, wrapper.values())) > 0
    kind = wrapper.get("type")
    if (kind if isinstance(kind, str) else getattr(kind, "__name__", "")).rpartition(".")[2] != "AmpOptimWrapper":
        return found
    wrapper["type"] = "OptimWrapper"
    for name in _AMP_ONLY:
        wrapper.pop(name, None)
    return True


def build_runner(cfg: Config) -> Runner:
    """Build the config's Runner, of the type ``runner_type`` if the config has one."""
    return RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)


class _Brief(logging.Filter):
    """Drop the lines that mmengine logs for each parameter: options of the optimizer and initialisation."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.funcName != "_dump_init_info" and not str(record.msg).startswith("paramwise_options")


def fit_checkpoints(runner: Runner) -> None:
    """Let the runner load weights by the loader that ``init_cfg`` uses, unless the config's hooks say how."""
    from mmspectral.engine.hooks.checkpoint_fitting import CheckpointFittingHook  # needs mmpretrain

    if not any(isinstance(hook, CheckpointFittingHook) for hook in runner.hooks):
        runner.register_hook(CheckpointFittingHook())


def launch_run(cfg: Config, run: Callable[[Runner], Any], notes: list[str] | None = None) -> Any:
    """Build the Runner on this process's device, hand it to ``run`` and leave the process group.

    Args:
        cfg: Config of the run, with ``launcher`` and ``work_dir``; it is adapted
            by :func:`mmspectral.engine.runner.resume.choose_checkpoint` and
            :func:`prepare_cfg_for_device`.
        run: What to do, such as ``Runner.train``.
        notes: Lines to log as warnings first.

    Lines that mmengine logs for each parameter are left out unless ``log_level`` is ``"DEBUG"``.

    Returns:
        What ``run`` returns.

    Raises:
        UsageError: The launcher's environment variables are missing, the work
            folder cannot be written, or the checkpoint cannot be used.
    """
    require_writable(cfg.work_dir)
    notes = [*(notes or []), *choose_checkpoint(cfg)] + prepare_cfg_for_device(cfg)
    if cfg.launcher != "none" and get_device() == "cpu":
        init_cpu_process_group(cfg.launcher, cfg.get("env_cfg", {}).get("dist_cfg"))
    try:
        runner = build_runner(cfg)
        if not runner.logger.isEnabledFor(logging.DEBUG):
            runner.logger.addFilter(_Brief())
        fit_checkpoints(runner)
        for note in notes:
            runner.logger.warning(note)
        return run(runner)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

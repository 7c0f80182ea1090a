"""Choose the checkpoint from which a run continues."""

import re
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.runner.checkpoint import CheckpointLoader

from mmspectral.compat.checkpoint_damage import find_damage
from mmspectral.errors import UnsafeCheckpointError, UsageError


def choose_checkpoint(cfg: Config) -> list[str]:
    """Find the file that ``cfg`` resumes or loads, and check it; changes ``cfg`` in place.

    ``resume=True`` without ``load_from`` means the newest checkpoint of the run
    that is whole; mmengine takes the one that the file ``last_checkpoint`` names,
    whatever is in it. The random seed of a resumed run becomes that of the
    checkpoint, unless the config has one: the order of the data follows from it.

    Args:
        cfg: Config of the run, with ``work_dir``.

    Returns:
        One sentence for each checkpoint that was passed over.

    Raises:
        UsageError: The file is damaged or no checkpoint of a run, or all that the
            folder has are.
    """
    source = cfg.get("load_from")
    if source is not None and ("://" in source or not Path(source).expanduser().is_file()):
        return []  # not on this machine: mmengine's loader reads it, or says that there is none
    if not cfg.get("resume"):
        if source is not None and (damage := _damage(Path(source).expanduser())):
            raise UsageError(f"{source} is damaged: {damage}. Copy or download it again, or take another checkpoint.")
        return []
    candidates = _checkpoints(cfg) if source is None else [Path(source).expanduser()]
    passed_over = []
    for path in candidates:
        # The folder of a sharded model is read by the strategy that wrote it.
        defect = None if path.is_dir() else _damage(path) or _defect(path, cfg)
        if defect is None:
            cfg.load_from = str(path)
            return passed_over
        passed_over.append(f"{path} is passed over: {defect}.")
    if passed_over:
        others = "" if source is None else " --resume without a path takes the newest whole one of the work folder."
        raise UsageError(
            f"There is no checkpoint to resume from. {' '.join(passed_over)} Nothing was changed. To begin anew, leave "
            f"--resume out and name another --work-dir.{others}"
        )
    return []  # the run was killed before its first checkpoint


def _checkpoints(cfg: Config) -> list[Path]:
    """Return the files that the checkpoint hook of ``cfg`` has written, the newest first."""
    hook = (cfg.get("default_hooks") or {}).get("checkpoint") or {}
    folder = Path(cfg.work_dir)
    if hook.get("out_dir") not in (None, cfg.work_dir):
        folder = Path(hook.out_dir, folder.name)  # as the hook does
    template = hook.get("filename_tmpl") or ("epoch_{}.pth" if hook.get("by_epoch", True) else "iter_{}.pth")
    name = re.compile(re.escape(template).replace(r"\{\}", r"(\d+)"))
    found = [(int(match[1]), path) for path in folder.glob("*") if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _damage(path: Path) -> str | None:
    try:
        return None if path.suffix == ".safetensors" else find_damage(path)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _defect(path: Path, cfg: Config) -> str | None:
    """Say why a whole file is not what a run can be resumed from; take the seed from one that is."""
    try:
        checkpoint = CheckpointLoader.load_checkpoint(str(path), map_location="meta", logger="silent")
    except UnsafeCheckpointError:
        raise
    except RuntimeError as error:
        return f"torch cannot read it ({str(error).partition(chr(10))[0]})"
    if not isinstance(checkpoint, dict) or not {"meta", "message_hub", "state_dict"} <= checkpoint.keys():
        return "it holds weights, not the state of a run; its weights can be used by load_from"
    randomness = dict(cfg.get("randomness") or {})
    if randomness.get("seed") is None:
        cfg.randomness = ConfigDict(randomness, seed=checkpoint["meta"].get("seed"))
    return None

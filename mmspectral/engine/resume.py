"""Choose the checkpoint from which a run continues or begins."""

import re
import string
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.runner.checkpoint import CheckpointLoader

from mmspectral.compat.checkpoint_damage import find_damage
from mmspectral.errors import UnsafeCheckpointError, UsageError

# What mmengine's Runner needs in order to go on; optimizer and schedules are left out by `save_optimizer=False`.
_STATE = {"meta": dict, "message_hub": dict, "state_dict": dict}


def choose_checkpoint(cfg: Config) -> list[str]:
    """Find the file that ``cfg`` resumes or loads, and check it; changes ``cfg`` in place.

    ``resume="auto"``, or ``resume=True`` without ``load_from``, means the newest whole checkpoint that the run's hook
    has written, or if there is none a beginning from ``load_from``; mmengine takes what the file ``last_checkpoint``
    names, whatever that is. The random seed of a resumed run becomes that of the checkpoint, unless the config has
    one: the order of the data follows from it.

    Args:
        cfg: Config of the run, with ``work_dir``.

    Returns:
        One sentence for each checkpoint that was passed over, and for what the chosen one lacks.

    Raises:
        UsageError: The file is missing, damaged or no checkpoint of a run, or all
            that the folder has are.
    """
    source, resume = cfg.get("load_from"), cfg.get("resume")
    automatic = resume == "auto" or (resume and source is None)
    if source is not None and not automatic:
        if "://" in source:
            return []  # mmengine's loader reads it, or says that there is none
        path = Path(source).expanduser()
        if not path.exists():
            raise UsageError(f"There is no checkpoint {source} in {Path.cwd()}, which is to be loaded.")
    if not resume:
        if source is not None and (damage := _damage(path)):
            raise UsageError(f"{source} is damaged: {damage}. Copy or download it again, or take another checkpoint.")
        return []
    passed_over, notes = [], []
    for candidate in _checkpoints(cfg) if automatic else [path]:
        defect = _damage(candidate) or _defect(candidate, cfg, notes)
        if defect is None:
            cfg.resume, cfg.load_from = True, str(candidate)
            return passed_over + notes
        passed_over.append(f"{candidate} is passed over: {defect}.")
    if passed_over:
        others = " --resume without a path takes the newest whole one of the work folder." if not automatic else ""
        raise UsageError(
            f"There is no checkpoint to resume from. {' '.join(passed_over)} Nothing was changed. To begin anew, leave "
            f"--resume out and name another --work-dir.{others}"
        )
    cfg.resume = False  # the run was killed before its first checkpoint
    return choose_checkpoint(cfg)


def _checkpoints(cfg: Config) -> list[Path]:
    """Return the files that the checkpoint hook of ``cfg`` has written, the newest first."""
    hook = (cfg.get("default_hooks") or {}).get("checkpoint") or {}
    folder = Path(cfg.work_dir)
    if hook.get("out_dir") not in (None, cfg.work_dir):
        folder = Path(hook.out_dir, folder.name)  # as the hook does
    template = hook.get("filename_tmpl") or ("epoch_{}.pth" if hook.get("by_epoch", True) else "iter_{}.pth")
    parts = string.Formatter().parse(template)
    name = re.compile("".join(re.escape(text) + ("" if field is None else r"(\d+)") for text, field, *_ in parts))
    found = [(int(match[1]), path) for path in folder.glob("*") if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _damage(path: Path) -> str | None:
    """Say what is wrong with a file that has checksums; files of torch < 1.6 and safetensors have none."""
    try:
        if path.is_dir():
            return None
        with path.open("rb") as file:
            return find_damage(path) if file.read(2) == b"PK" else None
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _defect(path: Path, cfg: Config, notes: list[str]) -> str | None:
    """Say why a whole file is not what a run can be resumed from; take the seed from one that is.

    ``notes`` get a sentence on what such a file leaves out.
    """
    if path.is_dir():  # of a sharded model, which only the strategy of a FlexibleRunner can read
        return None if "runner_type" in cfg else "it is a folder"
    try:
        checkpoint = CheckpointLoader.load_checkpoint(str(path), map_location="meta", logger="silent")
    except UnsafeCheckpointError:
        raise
    except Exception as error:  # torch stumbles over damaged bytes in many ways
        return f"torch cannot read it ({str(error).partition(chr(10))[0]})"
    if not isinstance(checkpoint, dict) or not _STATE.keys() <= checkpoint.keys():
        return "it holds weights, not the state of a run; its weights can be used by load_from"
    wrong = [name for name, kind in _STATE.items() if not isinstance(checkpoint[name], kind)]
    wrong = wrong or [
        f"meta[{name!r}]" for name in ("epoch", "iter") if not isinstance(checkpoint["meta"].get(name), int)
    ]
    if wrong:
        return f"its {wrong[0]} is not what a run writes"
    if "optimizer" not in checkpoint:
        notes.append(f"{path} has no state of the optimizer (save_optimizer=False): a new one goes on, not exactly so.")
    randomness = dict(cfg.get("randomness") or {})
    if randomness.get("seed") is None:
        cfg.randomness = ConfigDict(randomness, seed=checkpoint["meta"].get("seed"))
    return None

"""What a run of ``tools/train.py`` left in its folder: config, last checkpoint, metrics, loss, condition numbers."""

import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

from mmengine.config import Config
from torch import nn

from mmspectral.checkpoints import fit_to_model, read_checkpoint
from mmspectral.errors import UsageError

_EPOCH = re.compile(r"epoch_(\d{1,9})\.pth")
Curve = list[tuple[int, float]]

_KAPPA = re.compile(r"(conditioning/.+/([qkv])/kappa_)(before|after)")
_GRADIENT = re.compile(r"conditioning/.+/[qkv]/grad_norm")
_METRIC = re.compile(r"coco/(bbox|segm)_mAP|accuracy/top1|.*/(mAP|AP)")


def kappa_history(work_dir: Path) -> dict[str, Curve]:
    """Return the largest condition number over the measured layers at each measured iteration.

    Of all logs of the folder, so that a resumed run is one curve; the newer log counts. By series
    such as ``"q, W + C"``: projections without a correction count for ``W`` alone, rank-deficient ones
    not. Empty without a log of the :class:`~mmspectral.engine.ConditioningHook`.
    """
    largest: dict[str, dict[int, float]] = {}
    for record in _records(work_dir):
        at_step: dict[str, float] = {}
        for name, value in record.items():
            found = _KAPPA.fullmatch(name)
            if not found or not math.isfinite(value):
                continue
            if found[3] == "after" and record.get(f"{found[1]}before") == value:
                continue
            series = f"{found[2]}, {'W' if found[3] == 'before' else 'W + C'}"
            at_step[series] = max(value, at_step.get(series, 0.0))
        for series, value in at_step.items():
            largest.setdefault(series, {})[record["step"]] = value
    order = [f"{role}, {kind}" for role in "qkv" for kind in ("W", "W + C")]
    return {series: sorted(largest[series].items()) for series in order if series in largest}


def training_curves(work_dir: Path) -> dict[str, Curve]:
    """Return ``"loss"``, ``"gradient norm"`` (median over the measured projections) and metrics such as AP.

    Losses and gradients are over iterations, metrics over the step of the
    validation, which is the epoch in epoch-based loops.
    """
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for record in _records(work_dir):
        step = record.get("step", 0)
        if "loss" in record:
            curves["loss"][step] = record["loss"]
        gradients = [value for name, value in record.items() if _GRADIENT.fullmatch(name)]
        if gradients:
            curves["gradient norm"][step] = statistics.median(gradients)
        for name, value in record.items():
            if _METRIC.fullmatch(name):
                curves[name][step] = value
    return {name: sorted(points.items()) for name, points in curves.items()}


def last_metrics(work_dir: Path) -> dict[str, float]:
    """Return the COCO metrics of the last validation of a run; UsageError where no log holds one."""
    for record in reversed(_records(work_dir)):
        if "coco/bbox_mAP" in record:
            return {key: value for key, value in record.items() if key.startswith("coco/")}
    raise UsageError(f"{work_dir} holds no log with a validation of boxes; let the training finish.")


def run_config(work_dir: Path) -> Config:
    """Return the config of a detector that a run left in its folder; UsageError if there is none."""
    configs = sorted(filter(Path.is_file, work_dir.glob("*.py")), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise UsageError(f"{work_dir} holds no config; is it the work folder of a run of tools/train.py?")
    try:
        cfg = Config.fromfile(configs[-1])
        cfg.model.backbone.init_cfg = None  # the weights are those of the checkpoint
    except Exception as error:  # whatever the code of a file raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{configs[-1]} is no config of a model with a backbone ({reason}).") from error
    return cfg


def last_checkpoint(work_dir: Path) -> Path:
    """Return the checkpoint of the last epoch in the folder of a run; UsageError if there is none."""
    found = {int(match[1]): path for path in work_dir.glob("epoch_*.pth") if (match := _EPOCH.fullmatch(path.name))}
    found = {epoch: path for epoch, path in found.items() if path.is_file()}
    if not found:
        raise UsageError(f"{work_dir} holds no checkpoint epoch_*.pth; let the training finish.")
    return found[max(found)]


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint of a run into the model of its config; UsageError if it is of another."""
    try:
        weights, _ = fit_to_model(model, read_checkpoint(str(checkpoint)), str(checkpoint))
    except ValueError as error:
        raise UsageError(str(error)) from error
    missing = model.load_state_dict(weights.state_dict(), strict=False).missing_keys
    if missing:
        raise UsageError(f"{checkpoint} lacks {', '.join(missing[:4])}, which the model of the run has.")


def _records(work_dir: Path) -> list[dict]:
    """Return the numbers in the lines of all logs, oldest first.

    What is not such a line is left out, as the last one of a run that was killed, which may be cut short.
    """
    records = []
    for log in sorted(filter(Path.is_file, work_dir.glob("*/vis_data/scalars.json"))):
        for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            record = {"step": 0} | record if isinstance(record, dict) else {}
            record = {name: float(value) for name, value in record.items() if _is_number(value)}
            if record.get("step", math.nan).is_integer():
                records.append(record | dict(step=int(record["step"])))
    return records


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)

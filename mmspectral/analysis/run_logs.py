"""What a run of ``tools/train.py`` left in its folder: config, last checkpoint, metrics, loss, condition numbers."""

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

from mmengine.config import Config

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
            if not found or (found[3] == "after" and record.get(f"{found[1]}before") == value):
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
    """Return the COCO metrics of the last validation of a run; FileNotFoundError where no log holds one."""
    for record in reversed(_records(work_dir)):
        if "coco/bbox_mAP" in record:
            return {key: value for key, value in record.items() if key.startswith("coco/")}
    raise FileNotFoundError(f"{work_dir} holds no log with a validation; let the training finish.")


def run_config(work_dir: Path) -> Config:
    """Return the config that a run left in its folder; FileNotFoundError if there is none."""
    configs = sorted(work_dir.glob("*.py"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise FileNotFoundError(f"{work_dir} holds no config; is it the work folder of a run of tools/train.py?")
    return Config.fromfile(configs[-1])


def last_checkpoint(work_dir: Path) -> Path:
    """Return the checkpoint of the last epoch in the folder of a run; FileNotFoundError if there is none."""
    checkpoints = sorted(work_dir.glob("epoch_*.pth"), key=lambda path: int(path.stem.removeprefix("epoch_")))
    if not checkpoints:
        raise FileNotFoundError(f"{work_dir} holds no checkpoint epoch_*.pth; let the training finish.")
    return checkpoints[-1]


def _records(work_dir: Path) -> list[dict]:
    """Return the lines of all logs, oldest first; the last one of a run that was killed may be cut short."""
    records = []
    for log in sorted(work_dir.glob("*/vis_data/scalars.json")):
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records

"""Runs of several configs over several seeds, side by side: AP and condition numbers."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.runner import load_checkpoint

from mmspectral.analysis.model_states import build_model
from mmspectral.analysis.projections import attention_projections
from mmspectral.analysis.run_summary import last_checkpoint, last_metrics, run_config
from mmspectral.compat.checkpoints import use_safe_loading

SEED_SUFFIX = re.compile(r"-seed(\d+)$")


@dataclass(frozen=True)
class Run:
    """What one finished run is compared by.

    Args:
        group: Folder name without ``-seedN``.
        seed: N.
        box_ap: ``coco/bbox_mAP`` of the last validation.
        mask_ap: ``coco/segm_mAP`` likewise.
        kappa_start: Median, over layers and projections, of the condition number
            of what the layers multiply by (W + C, or W of a stock model), of the
            config's model as drawn from N.
        kappa_end: The same of the last checkpoint.
    """

    group: str
    seed: int
    box_ap: float
    mask_ap: float
    kappa_start: float
    kappa_end: float


def read_run(folder: Path) -> Run:
    """Read the folder of a finished run of ``tools/train.py`` named ``...-seedN``.

    Raises:
        ValueError: The name does not end in ``-seedN``.
        FileNotFoundError: No config, no checkpoint or no validation in it.
    """
    match = SEED_SUFFIX.search(folder.name)
    if not match:
        raise ValueError(f"{folder}: the name must end in -seedN, so that runs of one config can be grouped.")
    cfg, checkpoint, metrics = run_config(folder), last_checkpoint(folder), last_metrics(folder)
    use_safe_loading()
    model = build_model(_without_checkpoint(cfg), int(match[1]))
    start = median_kappa(model)
    load_checkpoint(model, str(checkpoint), map_location="cpu")
    return Run(
        folder.name[: match.start()],
        int(match[1]),
        metrics["coco/bbox_mAP"],
        metrics["coco/segm_mAP"],
        start,
        median_kappa(model),
    )


def median_kappa(model: torch.nn.Module) -> float:
    """Return the median condition number of what the attention projections of a model multiply by."""
    kappas = [
        effective.kappa
        for projection in attention_projections(model).values()
        for _, effective in projection.spectra().values()
    ]
    return statistics.median(kappas)


def comparison_table(runs: Sequence[Run]) -> str:
    """Return a Markdown table with one row per group: mean and, in brackets, smallest and largest of its seeds."""
    lines = [
        "| runs | seeds | box AP | mask AP | median kappa, start | median kappa, end |",
        "|---|---|---|---|---|---|",
    ]
    for group in dict.fromkeys(run.group for run in runs):
        members = [run for run in runs if run.group == group]
        seeds = ", ".join(str(run.seed) for run in sorted(members, key=lambda run: run.seed))
        cells = [
            _spread([run.box_ap for run in members], "{:.3f}".format),
            _spread([run.mask_ap for run in members], "{:.3f}".format),
            _spread([run.kappa_start for run in members], _short),
            _spread([run.kappa_end for run in members], _short),
        ]
        lines.append(f"| {group} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    return f"{form(statistics.mean(values))} ({form(min(values))} to {form(max(values))})"


def _short(kappa: float) -> str:
    return f"{kappa:.0f}" if kappa >= 100 else f"{kappa:.3g}"


def _without_checkpoint(cfg: Config) -> Config:
    cfg = cfg.copy()
    if cfg.model.backbone.get("init_cfg"):
        cfg.model.backbone.init_cfg = None
    return cfg

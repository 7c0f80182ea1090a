#!/usr/bin/env python
"""Print a table of finished detection runs, grouped by config over seeds: AP and condition numbers.

usage: compare_runs.py work_dirs/stock-seed0 work_dirs/stock-seed1 work_dirs/spectral-seed0 ...
"""

import argparse
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mmspectral.arguments import report_usage_errors
from mmspectral.errors import UsageError

SEED_SUFFIX = re.compile(r"-seed(\d{1,9})$")


class Run(NamedTuple):
    """One finished run: AP of its last validation, and medians of kappa over layers and projections.

    kappa is that of what the layers multiply by (W + C, or W of a stock model), of the
    config's model as drawn from the seed and with the last checkpoint.
    """

    group: str
    seed: int
    box_ap: float
    mask_ap: float
    kappa_start: float
    kappa_end: float


def read_run(folder: Path) -> Run:
    """Read the folder of a finished run of ``tools/train.py`` named ``...-seedN``."""
    from mmspectral.analysis import build_model, last_checkpoint, last_metrics, load_weights, run_config

    cfg, checkpoint, metrics = run_config(folder), last_checkpoint(folder), last_metrics(folder)
    match = SEED_SUFFIX.search(folder.name)
    model = build_model(cfg, int(match[1]))
    start = median_kappa(model)
    load_weights(model, checkpoint)
    ends = (metrics["coco/bbox_mAP"], metrics.get("coco/segm_mAP", math.nan), start, median_kappa(model))
    return Run(folder.name[: match.start()], int(match[1]), *ends)


def median_kappa(model) -> float:
    from mmspectral.analysis import attention_projections

    spectra = [pair for projection in attention_projections(model).values() for pair in projection.spectra().values()]
    if not spectra:
        raise UsageError("the model of the run has no attention projection whose condition number could be compared.")
    return statistics.median(effective.kappa for _, effective in spectra)


def comparison_table(runs: Sequence[Run]) -> str:
    """Return a Markdown table with one row per group: mean and, in brackets, smallest and largest of its seeds."""
    from mmspectral.analysis import markdown_table

    header = ("runs", "seeds", "box AP", "mask AP", "median kappa, start", "median kappa, end")
    rows = []
    for group in dict.fromkeys(run.group for run in runs):
        members = [run for run in runs if run.group == group]
        seeds = ", ".join(str(seed) for seed in sorted(run.seed for run in members))
        cells = [spread([getattr(run, name) for run in members], "{:.3f}".format) for name in ("box_ap", "mask_ap")]
        cells += [spread([getattr(run, name) for run in members], short) for name in ("kappa_start", "kappa_end")]
        rows.append([group, seeds, *cells])
    return markdown_table(header, rows)


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    if any(map(math.isnan, values)):
        return "not known"
    return f"{form(statistics.mean(values))} ({form(min(values))} to {form(max(values))})"


def short(kappa: float) -> str:
    return f"{kappa:.0f}" if kappa >= 100 else f"{kappa:.3g}"


@report_usage_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="WORK_DIR", help="folder of a run, named ...-seedN")
    args = parser.parse_args()
    for folder in args.runs:
        if not folder.is_dir():
            parser.error(f"there is no folder {folder}.")
        if not SEED_SUFFIX.search(folder.name):
            parser.error(f"{folder}: the name must end in -seedN, so that runs of one config can be grouped.")
    runs = [read_run(folder) for folder in args.runs]
    print(comparison_table(runs))


if __name__ == "__main__":
    main()

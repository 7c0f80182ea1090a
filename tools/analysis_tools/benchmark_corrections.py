#!/usr/bin/env python
"""Time finding C with and without an SVD on equal weights: interleaved pairs, median of the ratios, as CSV."""

import argparse
import csv
import platform
import sys
from collections.abc import Callable
from functools import partial

import torch
from mmspectral.analysis.paired_timing import compare_times, time_in_turn

from mmspectral import ops


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[192, 384, 768], help="D of the D x D projections")
    parser.add_argument("--batch", type=int, default=3, help="matrices at once: q, k and v")
    parser.add_argument("--kappas", type=float, nargs="+", default=[1e3, 1e6], help="promised condition numbers")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("quartiles need at least 2 pairs.")
    return args


def compare(W: torch.Tensor, kappa: float, pairs: int) -> dict:
    """Time both forms in turn, and say what condition numbers they reach."""
    forms = {"svd": ops.svd_correction, "polar": partial(ops.polar_correction, kappa=kappa)}

    def step(form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        form(W)
        if W.is_cuda:
            torch.cuda.synchronize()

    times = compare_times(time_in_turn({name: partial(step, form) for name, form in forms.items()}, pairs), "svd")
    reached = {name: ops.condition_number(W.double() + form(W).double()).max().item() for name, form in forms.items()}
    return dict(
        size=W.shape[-1],
        batch=W.shape[0],
        kappa=f"{kappa:g}",
        steps=len(ops.polar_schedule(kappa, W.shape[-1])),
        svd_ms=round(1e3 * times["svd"].seconds, 3),
        polar_ms=round(1e3 * times["polar"].seconds, 3),
        ratio=round(times["polar"].ratio, 4),
        ratio_lower_quartile=round(times["polar"].lower, 4),
        ratio_upper_quartile=round(times["polar"].upper, 4),
        kappa_svd=round(reached["svd"], 4),
        kappa_polar=round(reached["polar"], 4),
        pairs=pairs,
        device=torch.cuda.get_device_name(W.device) if W.is_cuda else platform.processor() or platform.machine(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    writer = None
    for size in args.sizes:
        generator = torch.Generator().manual_seed(0)
        W = (0.02 * torch.randn(args.batch, size, size, generator=generator)).to(args.device)
        for kappa in args.kappas:
            row = compare(W, kappa, args.pairs)
            if writer is None:
                writer = csv.DictWriter(sys.stdout, row, lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()

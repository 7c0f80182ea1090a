#!/usr/bin/env python
"""Time finding C with and without an SVD on equal weights: interleaved pairs, median of the ratios, as CSV."""

import argparse
import csv
import platform
import statistics
import sys
import time

import torch

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


def seconds(form, W: torch.Tensor) -> float:
    synchronize = torch.cuda.synchronize if W.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    form(W)
    synchronize()
    return time.perf_counter() - start


def compare(W: torch.Tensor, kappa: float, pairs: int) -> dict:
    """Time both forms in turn, each first in every other pair, and say what condition numbers they reach."""
    forms = {"svd": ops.svd_correction, "polar": lambda W: ops.polar_correction(W, kappa)}
    for form in forms.values():
        form(W)  # warm up
    times = {name: [] for name in forms}
    for pair in range(pairs):
        for name in list(forms)[:: 1 if pair % 2 else -1]:
            times[name].append(seconds(forms[name], W))
    ratios = [polar / svd for polar, svd in zip(times["polar"], times["svd"], strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    reached = {name: ops.condition_number(W.double() + form(W).double()).max().item() for name, form in forms.items()}
    return dict(
        size=W.shape[-1],
        batch=W.shape[0],
        kappa=f"{kappa:g}",
        steps=len(ops.polar_schedule(kappa, W.shape[-1])),
        svd_ms=round(1e3 * statistics.median(times["svd"]), 3),
        polar_ms=round(1e3 * statistics.median(times["polar"]), 3),
        ratio=round(median, 4),
        ratio_lower_quartile=round(lower, 4),
        ratio_upper_quartile=round(upper, 4),
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

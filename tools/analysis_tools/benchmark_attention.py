#!/usr/bin/env python
"""Time and peak memory of attention of linear cost against exact softmax, by length: interleaved rounds, as CSV.

``performer`` is our op with M = I fixed; ``darkformer-pytorch`` and
``performer-pytorch`` are the packages of that name, left out if not installed.
"""

import argparse
import csv
import importlib
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from mmspectral.analysis.paired_timing import compare_times, time_in_turn
from torch import Tensor

from mmspectral.ops import (
    draw_projection,
    fold_features,
    linear_attention,
    sharp_proposal,
    softmax_attention,
)

PACKAGES = {"darkformer-pytorch": "darkformer_pytorch", "performer-pytorch": "performer_pytorch"}
IMPLEMENTATIONS = ("softmax", "dark", "dark-sharp", "performer", *PACKAGES)
COLUMNS = ("impl", "n", "fwd_ms", "fwd_bwd_ms", "peak_extra_mib")
STATUS = Path("/proc/self/status")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[196, 1024, 4096, 16384, 65536], help="N")
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--baseline", choices=IMPLEMENTATIONS, default="softmax", help="what ratios are to")
    parser.add_argument("--softmax-up-to", type=int, default=16384, help="leave softmax out at greater lengths")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--features", type=int, default=128, help="m")
    parser.add_argument("--causal", action="store_true", help="leaves the packages out")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="CSV; default: standard output")
    parser.add_argument("--plot", type=Path, help="PNG, SVG or PDF of forward and backward time and memory by length")
    parser.add_argument("--peak-of", nargs=2, metavar=("IMPL", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("quartiles need at least 2 rounds.")
    return args


def available(args: argparse.Namespace) -> list[str]:
    """Return the wanted implementations that there are, saying which are left out and why."""
    names = []
    for name in args.impl:
        try:
            if name in PACKAGES:
                importlib.import_module(PACKAGES[name])
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        if name in PACKAGES and args.causal:
            print(f"{name} is left out: it is compared without causal only", file=sys.stderr)
            continue
        names.append(name)
    return names


def build(name: str, args: argparse.Namespace) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return attention as a function of q, k, v, and its parameters."""
    h, d, m = args.heads, args.head_dim, args.features
    if name == "softmax":
        return partial(softmax_attention, causal=args.causal), []
    if name in PACKAGES:
        module = importlib.import_module(PACKAGES[name])
        if name == "darkformer-pytorch":
            layer = module.DarkformerKernelAttention(d, h, num_features=m, deterministic=True)
        else:
            layer = module.FastAttention(d, nb_features=m)
        layer = layer.to(args.device)
        return layer, list(layer.parameters())
    w = draw_projection(m, d, seed=0).to(args.device)
    M = torch.eye(d, device=args.device).repeat(h, 1, 1).requires_grad_() if name != "performer" else None
    proposal = sharp_proposal(2 * torch.eye(d, device=args.device) * d**-0.5) if name == "dark-sharp" else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        features = fold_features(w, M, d, proposal=proposal, orthogonal=True)
        return linear_attention(q, k, v, features, causal=args.causal)

    return attention, [] if M is None else [M]


def make_step(name: str, n: int, args: argparse.Namespace, backward: bool) -> Callable[[], None]:
    """Return one run of forward, with or without backward, on data that depends on nothing but the shape."""
    generator = torch.Generator().manual_seed(n)
    shape = (args.batch, args.heads, n, args.head_dim)
    q, k, v, cotangent = (
        torch.randn(shape, generator=generator).to(args.device, getattr(torch, args.dtype)) for _ in range(4)
    )
    attention, parameters = build(name, args)
    leaves = [t.requires_grad_() for t in (q, k, v)] + parameters

    def step() -> None:
        if backward:
            torch.autograd.grad(attention(q, k, v), leaves, cotangent)
        else:
            with torch.no_grad():
                attention(q, k, v)
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()

    return step


def resident_kib(key: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(key))


def peak_extra_mib(name: str, n: int, args: argparse.Namespace) -> float:
    """Return the memory of forward and backward beyond inputs and what is loaded, outputs and gradients included."""
    step, warm_up = make_step(name, n, args, backward=True), make_step(name, 64, args, backward=True)
    warm_up()
    if args.device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step()
    return (resident_kib("VmHWM") - before) / 2**10


def peak_in_new_process(name: str, n: int, args: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--peak-of", name, str(n), "--device", args.device, "--dtype", args.dtype]
    for option in ("batch", "heads", "head-dim", "features", "threads"):
        command += [f"--{option}", str(getattr(args, option.replace("-", "_")))]
    command += ["--causal"] * args.causal
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(n: int, names: list[str], args: argparse.Namespace) -> list[dict]:
    """Return the rows of one length, and print ratios to the baseline."""
    names = [name for name in names if name != "softmax" or n <= args.softmax_up_to]
    seconds = {}
    for backward in (False, True):
        steps = {name: make_step(name, n, args, backward) for name in names}
        seconds[backward] = time_in_turn(steps, args.rounds)
    if args.baseline in names:
        for name, times in compare_times(seconds[True], args.baseline).items():
            print(
                f"N = {n}: {name} takes {times.ratio:.3f} ({times.lower:.3f} to {times.upper:.3f}) "
                f"of the time of {args.baseline}, forward and backward",
                file=sys.stderr,
                flush=True,
            )
    milliseconds = {b: {name: 1e3 * statistics.median(t) for name, t in seconds[b].items()} for b in seconds}
    return [
        dict(
            impl=name,
            n=n,
            fwd_ms=round(milliseconds[False][name], 3),
            fwd_bwd_ms=round(milliseconds[True][name], 3),
            peak_extra_mib=round(peak_in_new_process(name, n, args), 1),
        )
        for name in names
    ]


def crossover(rows: list[dict], name: str) -> str:
    """Say from which measured length on ``name`` is faster than softmax, forward and backward."""
    times = {(row["impl"], row["n"]): row["fwd_bwd_ms"] for row in rows}
    lengths = sorted(n for impl, n in times if impl == "softmax" and (name, n) in times)
    slower = [n for n in lengths if times[name, n] >= times["softmax", n]]
    if not slower:
        return f"{name} is faster than softmax at every length measured, from {lengths[0]} on"
    if slower[-1] == lengths[-1]:
        return f"softmax is faster than {name} at {slower[-1]}, the greatest length at which both were measured"
    return f"softmax is faster than {name} up to {slower[-1]}, {name} from {lengths[lengths.index(slower[-1]) + 1]} on"


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"fwd_bwd_ms": "forward and backward (ms)", "peak_extra_mib": "peak memory beyond inputs (MiB)"}
    for axes, (column, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name in dict.fromkeys(row["impl"] for row in rows):
            mine = [row for row in rows if row["impl"] == name]
            axes.plot([row["n"] for row in mine], [row[column] for row in mine], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="tokens N", ylabel=title)
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(json.dumps(peak_extra_mib(args.peak_of[0], int(args.peak_of[1]), args)))
        return
    names = available(args)
    print(
        f"{platform.processor() or platform.machine()}, {args.device}, {args.threads} threads, "
        f"torch {torch.__version__}, {args.dtype}, "
        f"B {args.batch}, h {args.heads}, d {args.head_dim}, m {args.features}",
        file=sys.stderr,
    )
    rows = [row for n in args.lengths for row in measure(n, names, args)]
    if any(row["impl"] == "softmax" for row in rows):
        for name in names:
            if name != "softmax":
                print(crossover(rows, name), file=sys.stderr)
    with args.out.open("w", newline="") if args.out else sys.stdout as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()

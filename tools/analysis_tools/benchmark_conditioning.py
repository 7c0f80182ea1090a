#!/usr/bin/env python
"""Time backbones with a correction against mmpretrain's own at the same weights, and print a Markdown table.

Stock and all corrections take turns in one process; a ratio is the median over
the rounds of a correction's time over stock's in the same round. A train step is
forward and backward, without optimizer; inference is in eval mode without
gradients, where "folded" is mmpretrain's own model with W + C in its weights: it
differs from stock in nothing but values, so its ratio shows how exact the others
are. Peak memory is that of a process of its own for each form, PyTorch and
imports included.
"""

import argparse
import csv
import multiprocessing
import platform
import resource
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from mmspectral.analysis.paired_timing import compare_times, time_in_turn
from torch import nn

from mmspectral.analysis.stock_twins import FAMILIES, DenseBackbone

CORRECTIONS = {
    "identity": dict(type="IdentityCorrection", scale=10.0, scope="full"),
    "identity-head": dict(type="IdentityCorrection", scale=10.0, scope="head"),
    "polar": dict(type="PolarCorrection"),
    "svd": dict(type="SVDCorrection", interval=1),
}
MODES = ("train", "inference")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=["xcit"])
    parser.add_argument("--arch", help="size of the family, if there is one; default: the paper's small one")
    parser.add_argument("--patch-size", type=int, default=16, help="of XCiT, ViT and DeiT")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, default=(512, 512), metavar=("H", "W"))
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["identity"])
    parser.add_argument("--mode", choices=[*MODES, "both"], default="train")
    parser.add_argument("--pairs", type=int, default=11, help="rounds of stock and all corrections")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="file to write the table to: .csv or .md")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("quartiles need at least 2 pairs.")
    if args.arch and len(args.family) > 1:
        parser.error("--arch is the size of one family; give one --family.")
    if args.out and args.out.suffix not in (".csv", ".md"):
        parser.error(f"--out must end in .csv or .md, got {args.out}.")
    return args


def modes(args: argparse.Namespace) -> tuple[str, ...]:
    return MODES if args.mode == "both" else (args.mode,)


def forms(args: argparse.Namespace, mode: str) -> list[str]:
    folded = ["folded"] if mode == "inference" and "identity" in args.corrections else []
    return ["stock", *args.corrections, *folded]


def backbone(args: argparse.Namespace, family: str) -> DenseBackbone:
    return DenseBackbone(family, args.arch, args.size, args.patch_size)


def build(args: argparse.Namespace, family: str, form: str) -> nn.Module:
    """Return the model of a form; all forms have the same W."""
    torch.manual_seed(0)
    ours = backbone(args, family).conditioned(CORRECTIONS["identity"] if form == "folded" else CORRECTIONS.get(form))
    if form in CORRECTIONS:
        return ours
    return backbone(args, family).folded(ours) if form == "folded" else backbone(args, family).stock(ours)


def make_step(args: argparse.Namespace, mode: str, model: nn.Module) -> Callable[[], None]:
    """Return what is timed; it leaves no gradients."""
    x = torch.randn(args.batch, 3, *args.size, generator=torch.Generator().manual_seed(0))
    training = mode == "train"
    model.train(training)

    def step() -> None:
        with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            outputs = model(x)
        if training:
            sum(out.float().square().mean() for out in outputs).backward()
            model.zero_grad(set_to_none=True)

    return step


def peak_memory(args: argparse.Namespace, family: str, form: str) -> dict[str, float]:
    """Return the peak resident memory of this process, in MiB, after two steps of each mode."""
    torch.set_num_threads(args.threads)
    # Not by `build`: a second model beside it, for its weights, would count.
    model = build(args, family, form) if form in CORRECTIONS else backbone(args, family).stock()
    peaks = {}
    for mode in reversed(modes(args)):  # inference first: the peak of a process never falls
        if form in forms(args, mode):
            step = make_step(args, mode, model)
            step()
            step()
            peaks[mode] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return peaks


def in_fresh_process(function: Callable, *arguments: object) -> object:
    """Return what ``function`` returns in a process that ends with it, even where this one is killed before."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_result, args=(sender, function, *arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(
            f"{function.__name__}{arguments[1:]} ended without a result: see above, or out of memory."
        ) from None
    finally:
        process.join()


def send_result(sender: Connection, function: Callable, *arguments: object) -> None:
    with sender:
        sender.send(function(*arguments))


def report_round(label: str, rounds: int, number: int, seconds: dict[str, float]) -> None:
    ratios = ", ".join(f"{form} {s / seconds['stock']:.4f}" for form, s in seconds.items() if form != "stock")
    print(f"{label}, pair {number}/{rounds}: {ratios}", file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, family: str, mode: str, peaks: dict[str, dict[str, float]]) -> list[dict]:
    models = {form: build(args, family, form) for form in forms(args, mode)}
    steps = {form: make_step(args, mode, model) for form, model in models.items()}
    seconds = time_in_turn(steps, args.pairs, partial(report_round, f"{family} {mode}", args.pairs))
    return [
        dict(
            family=family,
            arch=args.arch or FAMILIES[family].arch,
            input=" x ".join(map(str, (args.batch, 3, *args.size))),
            step=mode,
            form=form,
            ratio=round(times.ratio, 4),
            lower_quartile=round(times.lower, 4),
            upper_quartile=round(times.upper, 4),
            milliseconds=round(1e3 * times.seconds, 1),
            peak_mib=round(peaks[form][mode]),
            parameters=sum(p.numel() for p in models[form].parameters() if p.requires_grad),
            pairs=args.pairs,
            dtype="bfloat16 autocast" if args.autocast else "float32",
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            machine=platform.processor() or platform.machine(),
        )
        for form, times in compare_times(seconds, "stock").items()
    ]


def markdown(rows: list[dict]) -> str:
    first = rows[0]
    lines = [
        f"torch {first['torch']}, {first['threads']} threads of {first['machine']}, {first['dtype']}; "
        f"medians of {first['pairs']} interleaved pairs",
        "",
        "| family | input | step | form | time over stock (quartiles) | ms | peak MiB | parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "1" if row["form"] == "stock" else "{ratio:.3f} ({lower_quartile:.3f} to {upper_quartile:.3f})"
        template = f"| {{family}} {{arch}} | {{input}} | {{step}} | {{form}} | {ratio} "
        template += "| {milliseconds:.1f} | {peak_mib} | {parameters:,} |"
        lines.append(template.format(**row))
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    # Before any model is built here: Linux counts what the parent holds at the start of a process to its peak.
    peaks = {
        family: {
            form: in_fresh_process(peak_memory, args, family, form)
            for form in dict.fromkeys(form for mode in modes(args) for form in forms(args, mode))
        }
        for family in args.family
    }
    rows = [row for family in args.family for mode in modes(args) for row in measure(args, family, mode, peaks[family])]
    print(markdown(rows))
    if args.out and args.out.suffix == ".md":
        args.out.write_text(markdown(rows) + "\n")
    elif args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

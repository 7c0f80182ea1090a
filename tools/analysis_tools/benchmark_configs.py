#!/usr/bin/env python
"""Time whole training steps of configs against those of the first, and print a Markdown table with peak memory.

A step is forward, losses and backward of the config's model, without optimizer,
on one batch of the training data of the first config. All configs take turns in
one process; a ratio is the median over the rounds of its time over the first's
in the same round. Peak memory is that of a process of its own for each.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import DefaultScope, init_default_scope
from mmengine.runner import Runner, set_random_seed
from mmspectral.analysis.paired_timing import compare_times, time_in_turn

from mmspectral.registry import MODELS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="the first is what the others are divided by")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cfg-options", nargs="+", action=DictAction, default={}, help="changes to all configs")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("quartiles need at least 2 rounds.")
    return args


def load(path: str, args: argparse.Namespace) -> Config:
    cfg = Config.fromfile(path)
    cfg.merge_from_dict(args.cfg_options)
    return cfg


def first_batch(args: argparse.Namespace) -> dict:
    cfg = load(args.configs[0], args)
    init_default_scope(cfg.get("default_scope", "mmengine"))
    loader = dict(cfg.train_dataloader, num_workers=0, persistent_workers=False)
    return next(iter(Runner.build_dataloader(loader, seed=0)))


def make_step(path: str, batch: dict, args: argparse.Namespace) -> Callable[[], None]:
    """Return one training step of a config's model, from the same seed for all; it leaves no gradients."""
    cfg = load(path, args)
    set_random_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        model = MODELS.build(cfg.model)
        data = model.data_preprocessor(batch, training=True)

    def step() -> None:
        losses, _ = model.parse_losses(model(**data, mode="loss"))
        losses.backward()
        model.zero_grad(set_to_none=True)

    return step


def peak_mib(path: str, args: argparse.Namespace) -> float:
    """Return the peak memory of a new process that runs two steps, in MiB."""
    command = [sys.executable, __file__, *args.configs, "--threads", str(args.threads), "--peak-of", path]
    if args.cfg_options:
        command += ["--cfg-options", *(f"{key}={value}" for key, value in args.cfg_options.items())]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    batch = first_batch(args)
    if args.peak_of:
        step = make_step(args.peak_of, batch, args)
        step()
        step()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    steps = {path: make_step(path, batch, args) for path in args.configs}
    compared = compare_times(time_in_turn(steps, args.rounds), args.configs[0])
    shapes = {tuple(image.shape) for image in batch["inputs"]}
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads of "
        f"{platform.processor() or platform.machine()}; {len(batch['inputs'])} images of "
        f"{', '.join(map(str, sorted(shapes)))}; medians of {args.rounds} interleaved rounds\n"
    )
    print("| config | time over the first (quartiles) | s | peak MiB |\n|---|---|---|---|")
    for path, times in compared.items():
        ratio = f"{times.ratio:.3f} ({times.lower:.3f} to {times.upper:.3f})"
        print(f"| {Path(path).stem} | {ratio} | {times.seconds:.3f} | {peak_mib(path, args):.0f} |", flush=True)


if __name__ == "__main__":
    main()

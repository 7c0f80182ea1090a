#!/usr/bin/env python
"""Time and peak memory, everything compared in turn within one process: a Markdown table, and CSV with --out.

    benchmark.py attention     attention of linear cost against exact softmax, by length
    benchmark.py conditioning  backbones with a correction against mmpretrain's own at the same weights
    benchmark.py configs       whole training steps of configs against those of the first

A ratio is the median, over the rounds, of the time of a form over that of the
baseline in the same round, so that a slow minute of a shared machine falls on
both. Peak memory is that of a process of its own for each form.
"""

import argparse
import importlib
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from mmengine.config import DictAction

from mmspectral.arguments import read_config

PACKAGES = {"darkformer-pytorch": "darkformer_pytorch", "performer-pytorch": "performer_pytorch"}
IMPLEMENTATIONS = ("softmax", "dark", "dark-sharp", "performer", *PACKAGES)
FAMILIES = ("xcit", "swin", "vit", "deit", "davit")
CORRECTIONS = {
    "identity": dict(type="IdentityCorrection", scale=10.0, scope="full"),
    "identity-head": dict(type="IdentityCorrection", scale=10.0, scope="head"),
    "polar": dict(type="PolarCorrection"),
    "svd": dict(type="SVDCorrection", interval=1),
}
MODES = ("inference", "train")  # in this order in one process: its peak of memory never falls


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--rounds", type=int, default=7)
    common.add_argument("--threads", type=int, help="default: torch's")
    common.add_argument("--out", type=Path, metavar="CSV")

    device = argparse.ArgumentParser(add_help=False)
    device.add_argument("--device", help="default: cuda where there is one, else cpu")

    attention = commands.add_parser("attention", parents=[common, device], help=f"any of {', '.join(IMPLEMENTATIONS)}")
    attention.add_argument("--lengths", type=int, nargs="+", default=[196, 1024, 4096, 16384, 65536], help="N")
    attention.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    attention.add_argument("--baseline", choices=IMPLEMENTATIONS, default="softmax", help="what ratios are to")
    attention.add_argument("--softmax-up-to", type=int, default=16384, help="leave softmax out at greater lengths")
    attention.add_argument("--batch", type=int, default=1)
    attention.add_argument("--heads", type=int, default=6)
    attention.add_argument("--head-dim", type=int, default=64)
    attention.add_argument("--features", type=int, default=128, help="m")
    attention.add_argument("--causal", action="store_true", help="leaves the packages out")
    attention.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")

    conditioning = commands.add_parser("conditioning", parents=[common, device], help="stock, corrections and folded")
    conditioning.add_argument("--family", nargs="+", choices=FAMILIES, default=["xcit"])
    conditioning.add_argument("--arch", help="size of the family, if there is one; default: the paper's small one")
    conditioning.add_argument("--patch-size", type=int, default=16, help="of XCiT, ViT and DeiT")
    conditioning.add_argument("--batch", type=int, default=2)
    conditioning.add_argument("--size", type=int, nargs=2, default=(512, 512), metavar=("H", "W"))
    conditioning.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["identity"])
    conditioning.add_argument("--mode", choices=[*MODES, "both"], default="train", help="forward and backward, or eval")
    conditioning.add_argument("--autocast", action="store_true", help="bfloat16 autocast")

    configs = commands.add_parser("configs", parents=[common], help="steps without optimizer, on the first's data")
    configs.add_argument("configs", nargs="+", help="the first is what the others are divided by")
    configs.add_argument("--cfg-options", nargs="+", action=DictAction, metavar="KEY=VALUE", help="for all configs")

    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("quartiles need at least 2 rounds.")
    if args.command == "conditioning" and args.arch and len(args.family) > 1:
        parser.error("--arch is the size of one family; give one --family.")
    for config in getattr(args, "configs", ()):
        if "::" not in config and not Path(config).is_file():
            parser.error(f"there is no config {config}.")
    return args


def time_in_turn(
    steps: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time every step once per round, each in every place of the order as often as the others; each once before."""
    for step in steps.values():
        step()
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            steps[name]()
            seconds[name].append(clock() - start)
        print(f"round {i + 1}/{rounds}", end="\r", file=sys.stderr, flush=True)
    return seconds


def compare_times(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Return the columns ``ms``, ``ratio`` to the baseline and its two quartiles, by name."""
    compared = {}
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[baseline], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive")  # never outside the data
        numbers = (1e3 * statistics.median(times), *quartiles)
        columns = ("ms", "lower_quartile", "ratio", "upper_quartile")
        compared[name] = {column: round(number, 4) for column, number in zip(columns, numbers, strict=True)}
    return compared


def in_fresh_process(function: Callable, *arguments: object) -> object:
    """Return what ``function`` returns in a process that ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def peak_mib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


# attention


def available(args: argparse.Namespace) -> list[str]:
    """Return the wanted implementations that there are, saying which are left out and why."""
    names = []
    for name in args.impl:
        try:
            if name in PACKAGES and args.causal:
                raise ImportError("it is compared without causal only")
            if name in PACKAGES:
                importlib.import_module(PACKAGES[name])
            names.append(name)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return names


def build_attention(name: str, args: argparse.Namespace) -> tuple[Callable, list]:
    """Return attention as a function of q, k, v, and its parameters."""
    import torch

    from mmspectral.ops import draw_projection, fold_features, linear_attention, sharp_proposal, softmax_attention

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

    def attention(q, k, v):
        features = fold_features(w, M, d, proposal=proposal, orthogonal=True)
        return linear_attention(q, k, v, features, causal=args.causal)

    return attention, [] if M is None else [M]


def attention_step(name: str, n: int, args: argparse.Namespace, backward: bool) -> Callable[[], None]:
    """Return one run of forward, with or without backward, on data that depends on nothing but the shape."""
    import torch

    generator = torch.Generator().manual_seed(n)
    shape = (args.batch, args.heads, n, args.head_dim)
    q, k, v, cotangent = (
        torch.randn(shape, generator=generator).to(args.device, getattr(torch, args.dtype)) for _ in range(4)
    )
    attention, parameters = build_attention(name, args)
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


def attention_peak(name: str, n: int, args: argparse.Namespace) -> float:
    """Return the MiB of forward and backward beyond inputs and what is loaded, outputs and gradients included."""
    import torch

    torch.set_num_threads(args.threads)
    step, warm_up = attention_step(name, n, args, backward=True), attention_step(name, 64, args, backward=True)
    warm_up()
    if args.device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    before = resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step()
    return round((resident_kib("VmHWM") - before) / 2**10, 1)


def resident_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def benchmark_attention(args: argparse.Namespace) -> list[dict]:
    rows = []
    names = available(args)
    for n in args.lengths:
        here = [name for name in names if name != "softmax" or n <= args.softmax_up_to]
        seconds = [
            time_in_turn({name: attention_step(name, n, args, backward) for name in here}, args.rounds)
            for backward in (False, True)
        ]
        baseline = args.baseline if args.baseline in here else here[0]
        forward, both = (compare_times(each, baseline) for each in seconds)
        for name in here:
            peak = in_fresh_process(attention_peak, name, n, args)
            rows.append(dict(impl=name, n=n, forward_ms=forward[name]["ms"], **both[name], peak_extra_mib=peak))
    return rows


# conditioning


def forms(args: argparse.Namespace, mode: str) -> list[str]:
    """Return the forms compared; "folded" is mmpretrain's model with W + C in its weights, which shows the noise."""
    folded = ["folded"] if mode == "inference" and "identity" in args.corrections else []
    return ["stock", *args.corrections, *folded]


def build_backbone(args: argparse.Namespace, family: str, form: str):
    """Return the model of a form; all forms have the same W."""
    import torch

    from mmspectral.analysis import DenseBackbone

    torch.manual_seed(0)
    backbone = DenseBackbone(family, args.arch, args.size, args.patch_size)
    ours = backbone.conditioned(CORRECTIONS["identity"] if form == "folded" else CORRECTIONS.get(form))
    if form in CORRECTIONS:
        return ours
    return backbone.folded(ours) if form == "folded" else backbone.stock(ours)


def backbone_step(args: argparse.Namespace, mode: str, model) -> Callable[[], None]:
    """Return what is timed; it leaves no gradients."""
    import torch

    device = torch.device(args.device)
    x = torch.randn(args.batch, 3, *args.size, generator=torch.Generator().manual_seed(0)).to(device)
    training = mode == "train"
    model.to(device).train(training)  # train() of some of mmpretrain's models returns nothing

    def step() -> None:
        with torch.set_grad_enabled(training), torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            outputs = model(x)
        if training:
            sum(out.float().square().mean() for out in outputs).backward()
            model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def backbone_peaks(args: argparse.Namespace, family: str, form: str) -> dict[str, float]:
    """Return the peak of resident or, on a GPU, of allocated memory after two steps of each mode."""
    import torch

    from mmspectral.analysis import DenseBackbone

    torch.set_num_threads(args.threads)
    # Not by `build_backbone`: a second model beside it, for its weights, would count.
    backbone = DenseBackbone(family, args.arch, args.size, args.patch_size)
    model = backbone.conditioned(CORRECTIONS[form]) if form in CORRECTIONS else backbone.stock()
    peaks = {}
    for mode in modes(args):
        if form in forms(args, mode):
            step = backbone_step(args, mode, model)
            step()
            step()
            on_gpu = args.device.startswith("cuda")
            peaks[mode] = round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else peak_mib()
    return peaks


def modes(args: argparse.Namespace) -> tuple[str, ...]:
    return MODES if args.mode == "both" else (args.mode,)


def benchmark_conditioning(args: argparse.Namespace) -> list[dict]:
    wanted = list(dict.fromkeys(form for mode in modes(args) for form in forms(args, mode)))
    # Before any model is built here: Linux counts what the parent holds at the start of a process to its peak.
    peaks = {(family, form): in_fresh_process(backbone_peaks, args, family, form)
             for family in args.family for form in wanted}  # fmt: skip
    rows = []
    for family in args.family:
        for mode in modes(args):
            models = {form: build_backbone(args, family, form) for form in forms(args, mode)}
            steps = {form: backbone_step(args, mode, model) for form, model in models.items()}
            for form, times in compare_times(time_in_turn(steps, args.rounds), "stock").items():
                parameters = sum(p.numel() for p in models[form].parameters() if p.requires_grad)
                row = dict(family=family, arch=args.arch or "default", step=mode, form=form, **times)
                rows.append(row | dict(peak_mib=peaks[family, form][mode], parameters=parameters))
    return rows


# configs


def first_batch(args: argparse.Namespace) -> dict:
    from mmengine.registry import init_default_scope
    from mmengine.runner import Runner

    cfg = read_config(args.configs[0], args.cfg_options)
    init_default_scope(cfg.get("default_scope", "mmengine"))
    loader = dict(cfg.train_dataloader, num_workers=0, persistent_workers=False)
    return next(iter(Runner.build_dataloader(loader, seed=0)))


def config_step(path: str, batch: dict, args: argparse.Namespace) -> Callable[[], None]:
    """Return one training step of a config's model, from the same seed for all; it leaves no gradients."""
    from mmengine.registry import DefaultScope
    from mmengine.runner import set_random_seed

    from mmspectral.registry import MODELS

    cfg = read_config(path, args.cfg_options)
    set_random_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        model = MODELS.build(cfg.model)
        data = model.data_preprocessor(batch, training=True)

    def step() -> None:
        losses, _ = model.parse_losses(model(**data, mode="loss"))
        losses.backward()
        model.zero_grad(set_to_none=True)

    return step


def config_peak(path: str, args: argparse.Namespace) -> float:
    import torch

    torch.set_num_threads(args.threads)
    step = config_step(path, first_batch(args), args)
    step()
    step()
    return peak_mib()


def benchmark_configs(args: argparse.Namespace) -> list[dict]:
    peaks = {path: in_fresh_process(config_peak, path, args) for path in args.configs}
    batch = first_batch(args)
    steps = {path: config_step(path, batch, args) for path in args.configs}
    shapes = ", ".join(str(tuple(image.shape)) for image in batch["inputs"])
    compared = compare_times(time_in_turn(steps, args.rounds), args.configs[0])
    return [
        dict(config=Path(path).stem, images=shapes, **times, peak_mib=peaks[path]) for path, times in compared.items()
    ]


def main() -> None:
    args = parse_args()

    import torch

    from mmspectral.analysis import markdown_table, write_csv

    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    if "device" in args and args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {k: v for k, v in vars(args).items() if k not in ("command", "out", "configs", "device")}
    rows = globals()[f"benchmark_{args.command}"](args)
    machine = platform.processor() or platform.machine()
    if str(getattr(args, "device", "")).startswith("cuda"):
        machine = torch.cuda.get_device_name(args.device)
    print(f"torch {torch.__version__}, {machine}; {', '.join(f'{k} {v}' for k, v in settings.items())}\n")
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
    if args.out:
        write_csv(rows, args.out)


if __name__ == "__main__":
    main()

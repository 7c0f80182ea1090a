#!/usr/bin/env python
"""Time a train step of a conditioned backbone against the stock one: interleaved pairs, same weights, median ratio."""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time

import torch

from mmspectral.models import SpectralXCiT

VARIANTS = {
    "stock": None,
    "identity": dict(type="IdentityCorrection", scale=10.0, scope="full"),
    "identity-head": dict(type="IdentityCorrection", scale=10.0, scope="head"),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="small-12")
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, default=(512, 512), metavar=("H", "W"))
    parser.add_argument("--variant", choices=[name for name in VARIANTS if name != "stock"], default="identity")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--peak-memory-of", choices=VARIANTS, help="only run one step of this variant and print its peak"
    )
    return parser.parse_args()


def build(args: argparse.Namespace, variant: str) -> torch.nn.Module:
    from mmpretrain.models.backbones import XCiT

    torch.manual_seed(0)
    ours = SpectralXCiT(args.arch, args.patch_size, VARIANTS[variant], out_type="featmap", drop_path_rate=0.0).train()
    if variant != "stock":
        return ours
    first = ours.xca_layers[0]
    stock = XCiT(
        patch_size=args.patch_size,
        embed_dims=ours.embed_dims,
        depth=len(ours.xca_layers),
        cls_attn_layers=0,
        final_norm=False,
        num_heads=first.attn.num_heads,
        layer_scale_init_value=first.gamma1[0].item(),
        out_type="featmap",
        out_indices=ours.out_indices,
    )
    stock.load_state_dict(ours.state_dict(), strict=False)
    stock.cls_token.requires_grad_(False)  # unused by feature maps
    stock.train()
    return stock


def step(model: torch.nn.Module, x: torch.Tensor, autocast: bool) -> float:
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(x)
        loss = sum(out.float().square().mean() for out in outputs)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def peak_memory(args: argparse.Namespace, variant: str) -> float:
    """Return the peak resident memory, in MiB, of a fresh process that makes two steps."""
    command = [sys.executable, __file__, "--peak-memory-of", variant, "--arch", args.arch]
    command += ["--patch-size", str(args.patch_size), "--batch", str(args.batch), "--size", *map(str, args.size)]
    command += ["--threads", str(args.threads)] + ["--autocast"] * args.autocast
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    x = torch.randn(args.batch, 3, *args.size, generator=torch.Generator().manual_seed(0))
    if args.peak_memory_of:
        model = build(args, args.peak_memory_of)
        for _ in range(2):
            step(model, x, args.autocast)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return

    models = {name: build(args, name) for name in ("stock", args.variant)}
    for model in models.values():
        step(model, x, args.autocast)
    seconds = {name: [] for name in models}
    for pair in range(args.pairs):
        for name in list(models)[:: 1 if pair % 2 else -1]:  # alternate the order, so that neither is always first
            seconds[name].append(step(models[name], x, args.autocast))
        ratio = seconds[args.variant][-1] / seconds["stock"][-1]
        print(f"pair {pair + 1}/{args.pairs}: ratio {ratio:.4f}", file=sys.stderr, flush=True)
    ratios = [a / b for a, b in zip(seconds[args.variant], seconds["stock"], strict=True)]
    memory = {name: peak_memory(args, name) for name in models}
    print(
        json.dumps(
            dict(
                arch=args.arch,
                patch_size=args.patch_size,
                input=[args.batch, 3, *args.size],
                dtype="bfloat16 autocast" if args.autocast else "float32",
                variant=args.variant,
                pairs=args.pairs,
                median_ratio=round(statistics.median(ratios), 4),
                ratio_quartiles=[round(q, 4) for q in statistics.quantiles(ratios, n=4)],
                median_seconds={name: round(statistics.median(s), 4) for name, s in seconds.items()},
                peak_mib={name: round(mib, 1) for name, mib in memory.items()},
                parameters={
                    name: sum(p.numel() for p in m.parameters() if p.requires_grad) for name, m in models.items()
                },
                torch=torch.__version__,
                threads=args.threads,
                machine=platform.processor() or platform.machine(),
            ),
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Bytes, operator launches and a roofline estimate of backbones, counted without a GPU, as ratios.

One row per backbone and pass: mmpretrain's own class, ours unconditioned,
conditioned, and for ``dark`` attention of linear cost in ViT. Seconds are
estimates from the named device's peak rates, never measurements.
"""

import argparse
from pathlib import Path

FAMILIES = ("xcit", "swin", "vit", "deit", "davit")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES, "dark"], default=[*FAMILIES, "dark"])
    parser.add_argument("--arch", help="size of the family; default: the paper's small one")
    parser.add_argument("--patch-size", type=int, default=16, help="of XCiT, ViT and DeiT")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, default=(448, 448), metavar=("H", "W"))
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16", "fp16"], default=["fp32", "bf16"])
    parser.add_argument("--scale", type=float, default=10.0, help="lambda")
    parser.add_argument("--features", type=int, default=128, help="m of dark")
    parser.add_argument("--device", choices=["A100", "H100", "H200"], default="H200", help="of the estimate")
    parser.add_argument("--out", type=Path, metavar="CSV")
    args = parser.parse_args()
    if args.arch and len(args.family) > 1:
        parser.error("--arch is the size of one family; give one --family.")
    return args


def models(family: str, args: argparse.Namespace) -> dict:
    """Return the models of a family by name, the one that the others are divided by before each of them."""
    from mmspectral.analysis import DenseBackbone
    from mmspectral.models import DarkViT

    backbone = DenseBackbone("vit" if family == "dark" else family, args.arch, args.size, args.patch_size)
    ours = backbone.conditioned(None)
    if family == "dark":
        kernel = dict(type="dark", num_features=args.features)
        shared = dict(img_size=tuple(args.size), patch_size=args.patch_size, out_type="featmap")
        return {"ours": ours, "dark": DarkViT(backbone.size, kernel=kernel, **shared)}
    conditioning = dict(type="IdentityCorrection", scale=args.scale, scope="full")
    return {"mmpretrain": backbone.stock(), "ours": ours, "conditioned": backbone.conditioned(conditioning)}


def main() -> None:
    args = parse_args()

    import torch

    from mmspectral.analysis import backbone_traffic, markdown_table, ratios, write_csv

    rows = []
    for family in args.family:
        torch.manual_seed(0)
        built = models(family, args)
        for precision in args.precision:
            for step in ("forward", "train"):
                baseline = None
                for name, model in built.items():
                    traffic = backbone_traffic(model, (args.batch, 3, *args.size), precision, step == "train")
                    over = ratios(traffic, baseline or traffic)
                    rows.append(
                        dict(
                            family=family,
                            precision=precision,
                            step=step,
                            model=name,
                            gigabytes=round(traffic.bytes / 1e9, 3),
                            launches=traffic.launches,
                            bytes_ratio=round(over["bytes"], 3),
                            launches_ratio=round(over["launches"], 3),
                            estimated_ms=round(1e3 * traffic.seconds[args.device], 3),
                        )
                    )
                    baseline = traffic
    print(f"torch {torch.__version__}; {args.batch} images of {args.size[0]} x {args.size[1]}; ratios are to the row")
    print(f"above; estimated_ms is a roofline estimate for one {args.device}, nothing measured\n")
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
    if args.out:
        write_csv(rows, args.out)


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Tabulate how one-hot the attention of backbones starts, over lambda and the correlation of tokens.

Prints a Markdown table and the largest lambda that keeps half of the entropy of
uniform attention at correlation 0.5; gradients are relative to those at lambda 0.
"""

import argparse
from pathlib import Path

BACKBONES = (
    "SpectralXCiT:small-12",
    "SpectralSwin:tiny",
    "SpectralViT:base",
    "SpectralDeiT:deit-small",
    "SpectralDaViT:tiny",
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", nargs="+", default=BACKBONES, metavar="TYPE:ARCH")
    parser.add_argument("--scales", nargs="+", type=float, default=[0, 0.1, 0.3, 1, 3, 10], metavar="LAMBDA")
    parser.add_argument("--correlations", nargs="+", type=float, default=[0, 0.5, 0.9])
    parser.add_argument(
        "--preserve-norm",
        type=float,
        metavar="STD",
        help="also measure the norm-preserving form, for initial weights of this standard deviation",
    )
    parser.add_argument("--layers", type=int, default=4, help="attention layers of each kind, evenly spaced")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--csv", type=Path, help="file to write the same numbers to")
    return parser.parse_args()


def main() -> None:
    args = parse_args()

    from mmengine.logging import MMLogger

    from mmspectral.analysis import largest_scale, probe_backbone, saturation_rows, saturation_table, write_csv

    MMLogger.get_instance("saturation_table", log_level="WARNING")  # initialisation logs every parameter
    forms = [None] if args.preserve_norm is None else [None, args.preserve_norm]
    rows, suggestions = [], []
    for name in args.backbones:
        type_name, _, arch = name.partition(":")
        for backbone in probe_backbone(type_name, arch, args.layers, args.image_size):
            rows += saturation_rows(backbone, args.scales, args.correlations, forms)
            suggestions.append((backbone.name, [largest_scale(backbone, preserve_norm=form) for form in forms]))
    print(saturation_table(rows))
    print("\nLargest lambda with at least half of the maximal entropy at correlation 0.5 in every layer measured:")
    for name, scales in suggestions:
        print(f"- {name}: {', norm kept: '.join(f'{scale:g}' for scale in scales)}")
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()

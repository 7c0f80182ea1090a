"""Export a backbone or a classifier as ONNX or as a program of torch.export.

usage: python tools/export.py CONFIG CHECKPOINT --format onnx --out FILE.onnx [--part backbone]

Corrections are folded into their weights. The file takes any number of float32 images of any size (with --fixed-size of
one), normalised as the config's data_preprocessor does it. It is compared with eager mode before it gets its name.
Of a detector only the backbone can be exported.
"""

import argparse
from pathlib import Path

from mmspectral.arguments import (
    add_config_arguments,
    add_trust_argument,
    read_config,
    report_usage_errors,
    require_checkpoint,
    set_loading,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Export a backbone or a classifier")
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument("checkpoint", help="checkpoint file or URL")
    parser.add_argument("--format", choices=("onnx", "exported-program"), required=True, help="file format")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, .onnx or .pt2")
    parser.add_argument("--part", choices=("model", "backbone"), default="model", help="what to export")
    parser.add_argument(
        "--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"), help="image size of the check"
    )
    parser.add_argument("--fixed-size", action="store_true", help="take images of --size only, any number of them")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    require_checkpoint(args.checkpoint)
    cfg = read_config(args.config, args.cfg_options)
    set_loading(args)
    from mmspectral.apis import export  # the backbones, after what is wrong at first sight

    size = tuple(args.size)
    print(export(cfg, args.checkpoint, args.out, args.format, args.part, size, args.fixed_size, args.force))


if __name__ == "__main__":
    main()

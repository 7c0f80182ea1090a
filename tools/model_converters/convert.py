"""Rename the weights of a backbone from one code base's names to another's.

usage: python tools/model_converters/convert.py SRC DST --to {mmpretrain,mmdet,timm,official,mmseg}

SRC may be a file of mmpretrain, mmdet, timm or the official code, .pth or .safetensors; its names tell which.
"""

import argparse
from pathlib import Path

from mmspectral.arguments import report_usage_errors, require_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rename the weights of a backbone")
    parser.add_argument("source", metavar="SRC", help="checkpoint file or URL")
    parser.add_argument("target", metavar="DST", type=Path, help="file to write, .pth or .safetensors")
    parser.add_argument(
        "--to", required=True, metavar="NAMES", help="names of the new file: mmpretrain, mmdet, timm, official or mmseg"
    )
    parser.add_argument("--family", help="xcit, swin, vit or davit (default: from the names in the file)")
    parser.add_argument("--force", action="store_true", help="replace DST if it is there")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    require_checkpoint(args.source)
    from mmspectral.checkpoints import convert  # torch, after what is wrong at first sight

    print(convert(args.source, args.target, args.to, args.family, args.force))


if __name__ == "__main__":
    main()

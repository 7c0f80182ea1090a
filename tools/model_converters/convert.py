"""Rename the weights of a backbone from one code base's names to another's.

usage: python tools/model_converters/convert.py SRC DST --to {mmpretrain,mmdet,timm,official,mmseg}

SRC may be a file of mmpretrain, mmdet, timm or the official code, .pth or .safetensors; its names tell which.
"""

import argparse
from pathlib import Path

from mmspectral.arguments import report_usage_errors
from mmspectral.checkpoints.convert import TARGETS, convert
from mmspectral.checkpoints.names import FAMILIES


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rename the weights of a backbone")
    parser.add_argument("source", metavar="SRC", help="checkpoint file or URL")
    parser.add_argument("target", metavar="DST", type=Path, help="file to write, .pth or .safetensors")
    parser.add_argument("--to", required=True, choices=TARGETS, help="whose names the new file has")
    parser.add_argument("--family", choices=FAMILIES, help="kind of backbone (default: found out from the names)")
    parser.add_argument("--force", action="store_true", help="replace DST if it is there")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    print(convert(args.source, args.target, args.to, args.family, args.force))


if __name__ == "__main__":
    main()

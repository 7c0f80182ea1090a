"""Write W + C in the place of W, so that stock code and other tools load the file.

usage: python tools/model_converters/fold.py SRC DST
"""

import argparse
from pathlib import Path

from mmspectral.arguments import report_usage_errors, require_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fold corrections into their weights")
    parser.add_argument("source", metavar="SRC", help="checkpoint file or URL")
    parser.add_argument("target", metavar="DST", type=Path, help="file to write, .pth or .safetensors")
    parser.add_argument("--force", action="store_true", help="replace DST if it is there")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    require_checkpoint(args.source)
    from mmspectral.checkpoints import fold_file  # torch, after what is wrong at first sight

    print(fold_file(args.source, args.target, args.force))


if __name__ == "__main__":
    main()

"""Write what others need of a training checkpoint, with a hash in its name.

usage: python tools/model_converters/publish.py SRC DST [--fold]

DST of name.pth becomes name_DATE-HASH.pth. Weights and meta are kept; optimizer, schedulers and logs are not.
"""

import argparse
from pathlib import Path

from mmspectral.arguments import report_usage_errors, require_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Publish a training checkpoint")
    parser.add_argument("source", metavar="SRC", help="checkpoint file or URL")
    parser.add_argument("target", metavar="DST", type=Path, help="file to write, without date and hash")
    parser.add_argument("--fold", action="store_true", help="fold all corrections into their weights")
    parser.add_argument("--force", action="store_true", help="replace a file of the resulting name")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    require_checkpoint(args.source)
    from mmspectral.checkpoints import publish  # torch, after what is wrong at first sight

    print(publish(args.source, args.target, args.fold, args.force))


if __name__ == "__main__":
    main()

"""Subtract the correction of a config's model from a folded or stock file: W = W' - C.

usage: python tools/model_converters/unfold.py CONFIG SRC DST
"""

import argparse
from pathlib import Path

from mmspectral.arguments import add_config_arguments, read_config, report_usage_errors, require_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Subtract a config's corrections from the weights of a file")
    add_config_arguments(parser)
    parser.add_argument("source", metavar="SRC", help="checkpoint file or URL")
    parser.add_argument("target", metavar="DST", type=Path, help="file to write, .pth or .safetensors")
    parser.add_argument("--force", action="store_true", help="replace DST if it is there")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    cfg = read_config(args.config, args.cfg_options)
    require_checkpoint(args.source)
    from mmspectral.checkpoints import unfold_file  # torch, after what is wrong at first sight

    print(unfold_file(cfg, args.source, args.target, args.force))


if __name__ == "__main__":
    main()

"""Choose M, proposal and shift of DARK attention for the weights of a checkpoint, and write both into a new one.

usage: python tools/analysis_tools/calibrate_dark.py CONFIG CHECKPOINT OUT [--batches n] [--features m]

CONFIG is that of the model with DARK attention, CHECKPOINT mostly one with softmax attention. Prints a table: how
anisotropic the queries and keys of each layer are, and the estimated error of its attention before and after. Train on
with load_from=OUT, or with init_cfg=dict(type='Pretrained', checkpoint=OUT) in the backbone.
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
from mmspectral.errors import UsageError


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calibrate the DARK attention of a checkpoint")
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint file or URL")
    parser.add_argument("out", metavar="OUT", type=Path, help="file to write, .pth or .safetensors")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="batches to run the model on")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="images in each batch")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens kept per image, at most")
    parser.add_argument(
        "--features", type=int, metavar="m", help="num_features (default: those of the config's kernel)"
    )
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps with which M is fitted; 0: not")
    parser.add_argument("--data", choices=["train", "val", "test"], default="train", help="which data to calibrate on")
    parser.add_argument("--seed", type=int, default=0, help="seed of images, tokens and draws")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="file to write the table to as well")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    args = parser.parse_args()
    if min(args.batches, args.batch_size) < 1 or args.tokens < 2 or args.steps < 0:
        parser.error("--batches and --batch-size must be at least 1, --tokens 2, --steps 0")
    return args


@report_usage_errors
def main() -> None:
    args = parse_args()
    require_checkpoint(args.checkpoint)
    if args.out.exists() and not args.force:
        raise UsageError(f"{args.out} is there already; choose another name or pass --force.")
    cfg = read_config(args.config, args.cfg_options)

    from mmspectral.analysis import Fit, calibrate_checkpoint, calibration_table, write_csv

    set_loading(args)
    rows = calibrate_checkpoint(
        cfg,
        args.checkpoint,
        args.out,
        num_batches=args.batches,
        batch_size=args.batch_size,
        num_features=args.features,
        part=args.data,
        seed=args.seed,
        force=args.force,
        num_tokens=args.tokens,
        fit=Fit(args.steps) if args.steps else None,
    )
    print(calibration_table(rows))
    if args.csv:
        write_csv(rows, args.csv)
    print(args.out)


if __name__ == "__main__":
    main()

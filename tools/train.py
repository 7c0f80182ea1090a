"""Train a detector or a classifier.

usage: python tools/train.py CONFIG [--work-dir DIR] [--resume [CHECKPOINT]] [--amp] [--auto-scale-lr]

Several processes: tools/dist_train.sh, tools/slurm_train.sh.
"""

import argparse

from mmspectral.arguments import add_run_arguments, report_usage_errors, require_checkpoint, run_config
from mmspectral.errors import UsageError


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a detector or a classifier")
    add_run_arguments(parser)
    parser.add_argument("--amp", action="store_true", help="train in mixed precision (on a GPU)")
    parser.add_argument(
        "--auto-scale-lr", action="store_true", help="scale the learning rate from auto_scale_lr.base_batch_size"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="CHECKPOINT",
        help="continue from this checkpoint; without a value, from the newest one in the work folder",
    )
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    if args.resume not in (None, "auto"):
        require_checkpoint(args.resume)
    cfg = run_config(args)

    # Heavy imports come after what a mistyped path stops.
    from mmengine.runner import Runner

    from mmspectral.datasets import check_before_training
    from mmspectral.engine import check_config, launch_run, runtime_notes

    if args.amp:
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.loss_scale = "dynamic"
    if args.auto_scale_lr:
        if "base_batch_size" not in (cfg.get("auto_scale_lr") or {}):
            raise UsageError(
                "--auto-scale-lr needs the batch size that the config's learning rate is meant for: "
                "add auto_scale_lr = dict(base_batch_size=..., enable=False) to the config."
            )
        cfg.auto_scale_lr.enable = True
    if args.resume == "auto":
        cfg.resume = "auto"
    elif args.resume is not None:
        cfg.resume, cfg.load_from = True, args.resume

    notes = runtime_notes(cfg)
    check_config(cfg)
    check_before_training(cfg)
    launch_run(cfg, Runner.train, notes, exclusive=True)


if __name__ == "__main__":
    main()

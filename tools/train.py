"""Train a detector or a classifier.

usage: python tools/train.py CONFIG [--work-dir DIR] [--resume [CHECKPOINT]] [--amp] [--auto-scale-lr]

Several processes: tools/dist_train.sh, tools/slurm_train.sh.
"""

import argparse

from mmengine.runner import Runner
from torch.distributed.elastic.multiprocessing.errors import record

from mmspectral.arguments import add_run_arguments, report_usage_errors, run_config
from mmspectral.datasets.check import check_before_training
from mmspectral.engine.runner.fault_tolerance import make_fault_tolerant
from mmspectral.engine.runner.launch import enable_amp, enable_lr_scaling, launch_run, set_resume


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


@record
@report_usage_errors
def main() -> None:
    args = parse_args()
    cfg = run_config(args)
    if args.amp:
        enable_amp(cfg)
    if args.auto_scale_lr:
        enable_lr_scaling(cfg)
    if args.resume is not None:
        set_resume(cfg, args.resume)
    make_fault_tolerant(cfg)
    check_before_training(cfg)
    launch_run(cfg, Runner.train)


if __name__ == "__main__":
    main()

"""Test a detector or a classifier on the test set of its config.

usage: python tools/test.py CONFIG CHECKPOINT [--out FILE.pkl] [--show-dir DIR] [--tta]

Several processes: tools/dist_test.sh, tools/slurm_test.sh.
"""

import argparse

from mmspectral.arguments import add_run_arguments, report_usage_errors, require_checkpoint, run_config


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test a detector or a classifier")
    add_run_arguments(parser)
    parser.add_argument("checkpoint", help="checkpoint file or URL")
    parser.add_argument("--out", metavar="FILE", help="write the predictions to this pickle file")
    parser.add_argument("--show", action="store_true", help="show each picture with its predictions")
    parser.add_argument("--show-dir", metavar="DIR", help="write each picture with its predictions to this folder")
    parser.add_argument("--wait-time", type=float, default=2.0, help="seconds for which --show shows a picture")
    parser.add_argument("--tta", action="store_true", help="merge the predictions of several views of each image")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    require_checkpoint(args.checkpoint)
    cfg = run_config(args)

    # Heavy imports come after what a mistyped path stops.
    from mmspectral import engine

    engine.check_config(cfg)
    cfg.load_from = args.checkpoint
    cfg.resume = False
    writer = engine.predictions_writer(cfg, args.out) if args.out else None
    notes = engine.use_test_time_augmentation(cfg) if args.tta else []
    if args.show or args.show_dir:
        engine.show_predictions(cfg, args.show_dir, window=args.show, wait_time=args.wait_time)

    def test(runner) -> None:
        if writer:
            runner.test_evaluator.metrics.append(writer)
        runner.test()

    engine.launch_run(cfg, test, notes)


if __name__ == "__main__":
    main()

"""Summarise a finished detection run: final metrics, a picture of predictions and one of condition numbers."""

import argparse
from pathlib import Path

from mmspectral.analysis.run_summary import summarize_run


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path, help="folder of a run of tools/train.py")
    parser.add_argument("--train-seconds", type=float, help="for summary.json")
    parser.add_argument("--setup-seconds", type=float, help="for summary.json")
    parser.add_argument("--images", type=int, default=8, help="validation images to draw")
    parser.add_argument("--score-thr", type=float, default=0.5, help="predictions below it are not drawn")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    seconds = {"train_seconds": args.train_seconds, "setup_seconds": args.setup_seconds}
    summary = summarize_run(args.work_dir, args.images, args.score_thr, seconds)
    for key in ("coco/bbox_mAP", "coco/segm_mAP"):
        print(f"{key}: {summary[key]:.3f}")
    for name in ("summary.json", "predictions.png", "conditioning.png"):
        print(args.work_dir / name)


if __name__ == "__main__":
    main()

"""Predict on images with a detector or a classifier.

usage: python tools/predict.py CONFIG CHECKPOINT IMAGES [IMAGES ...] -o DIR

Writes DIR/results.json (COCO's results format for a detector), DIR/images.json (the ids of images and categories)
and a picture for each image in DIR/vis. Images that cannot be read are reported, and the exit status is then 1.
"""

import argparse
import sys
from pathlib import Path

from mmspectral.apis import find_images, predict
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
    parser = argparse.ArgumentParser(description="Predict on images with a detector or a classifier")
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument("checkpoint", help="checkpoint file or URL")
    parser.add_argument("images", nargs="+", help="image files, folders with images, or quoted patterns")
    parser.add_argument("-o", "--out-dir", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--score-thr", type=float, default=0.3, help="least score of what is drawn (default: 0.3); the JSON holds all"
    )
    parser.add_argument("--device", help="torch device (default: an accelerator if there is one)")
    parser.add_argument("--batch-size", type=int, default=1, help="images in one forward pass")
    parser.add_argument("--no-pictures", action="store_true", help="write the JSON only")
    parser.add_argument("--ann-file", metavar="FILE", help="COCO annotation file with the ids of images and categories")
    args = parser.parse_args()
    if args.batch_size < 1:
        parser.error(f"--batch-size is {args.batch_size}, but a batch has at least one image")
    return args


@report_usage_errors
def main() -> None:
    args = parse_args()
    require_checkpoint(args.checkpoint)
    if args.ann_file and not Path(args.ann_file).is_file():
        raise UsageError(f"There is no annotation file {args.ann_file} in {Path.cwd()}.")
    images = find_images(args.images)
    cfg = read_config(args.config, args.cfg_options)
    set_loading(args)
    result = predict(
        cfg,
        args.checkpoint,
        images,
        args.out_dir,
        device=args.device,
        batch_size=args.batch_size,
        score_thr=args.score_thr,
        pictures=not args.no_pictures,
        ann_file=args.ann_file,
    )
    print(f"{len(result.records)} records for {len(result.images)} images in {args.out_dir / 'results.json'}")
    best = max((record["score"] for record in result.records), default=0.0)
    if not args.no_pictures and best < args.score_thr:
        print(f"nothing is drawn: no score is above --score-thr {args.score_thr:g}, the best is {best:.3f}")
    if result.category_source:
        print(f"category ids: {result.category_source}")
    for path in result.unreadable:
        print(f"predict.py: error: {path} is no image that can be read and resized; it was left out", file=sys.stderr)
    if result.unreadable:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Summarise a finished detection run: final metrics, a picture of predictions and one of condition numbers."""

import argparse
import json
import sys
from pathlib import Path

from mmspectral.arguments import report_usage_errors

PACKAGES = ("mmspectral", "torch", "torchvision", "mmengine", "mmcv", "mmdet", "mmpretrain")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path, help="folder of a run of tools/train.py")
    parser.add_argument("--train-seconds", type=float, help="for summary.json")
    parser.add_argument("--setup-seconds", type=float, help="for summary.json")
    parser.add_argument("--images", type=int, default=8, help="validation images to draw")
    parser.add_argument("--score-thr", type=float, default=0.5, help="predictions below it are not drawn")
    args = parser.parse_args()
    if not args.work_dir.is_dir():
        parser.error(f"there is no folder {args.work_dir}.")
    return args


def summarize_run(work_dir: Path, num_images: int, score_thr: float, extra: dict) -> dict:
    """Write ``summary.json`` (returned), ``predictions.png`` and, of a conditioned model, ``conditioning.png``."""
    from mmdet.registry import DATASETS, MODELS
    from mmengine.registry import DefaultScope

    from mmspectral import analysis

    cfg, checkpoint = analysis.run_config(work_dir), analysis.last_checkpoint(work_dir)
    metrics = analysis.last_metrics(work_dir)
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmdet")):
        model = MODELS.build(cfg.model)
        dataset = DATASETS.build(cfg.val_dataloader.dataset)
    analysis.load_weights(model, checkpoint)
    samples = predict(model.eval(), dataset, num_images)
    classes, palette = dataset.metainfo["classes"], dataset.metainfo["palette"]
    analysis.draw_prediction_sheet(samples, str(work_dir / "predictions.png"), classes, palette, score_thr)
    rows = analysis.projection_conditions(model)
    if rows:
        title = f"{cfg.model.backbone.type}, {checkpoint.name}"
        analysis.plot_projection_conditions(rows, str(work_dir / "conditioning.png"), title)
    versions = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    summary = dict(metrics, **extra, checkpoint=str(checkpoint), versions=versions)
    (work_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def predict(model, dataset, num_images: int) -> list:
    """Predict evenly spaced images that have something to find."""
    import torch
    from mmengine.dataset import pseudo_collate

    wanted = [
        i for i in range(len(dataset)) if any(not n["ignore_flag"] for n in dataset.get_data_info(i)["instances"])
    ]
    chosen = wanted[:: max(1, len(wanted) // num_images)][:num_images]
    with torch.no_grad():
        return [model.test_step(pseudo_collate([dataset[i]]))[0].cpu() for i in chosen]


@report_usage_errors
def main() -> None:
    args = parse_args()
    seconds = {"train_seconds": args.train_seconds, "setup_seconds": args.setup_seconds}
    summary = summarize_run(args.work_dir, args.images, args.score_thr, seconds)
    for key in ("coco/bbox_mAP", "coco/segm_mAP"):
        if key in summary:
            print(f"{key}: {summary[key]:.3f}")
    for name in ("summary.json", "predictions.png", "conditioning.png"):
        if (args.work_dir / name).exists():
            print(args.work_dir / name)


if __name__ == "__main__":
    main()

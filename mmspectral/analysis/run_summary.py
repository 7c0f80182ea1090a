"""What a finished detection run left behind: metrics, pictures, versions."""

import importlib.metadata
import json
from copy import deepcopy
from pathlib import Path

import torch
from mmdet.registry import DATASETS, MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DefaultScope
from mmengine.runner import load_checkpoint

from mmspectral.analysis.condition_numbers import plot_projection_conditions, projection_conditions
from mmspectral.analysis.prediction_sheet import draw_prediction_sheet
from mmspectral.compat.checkpoints import use_safe_loading
from mmspectral.version import __version__

PACKAGES = (
    ("torch",),
    ("torchvision",),
    ("onedl-mmengine", "mmengine"),
    ("onedl-mmcv", "mmcv", "mmcv-lite"),
    ("onedl-mmdetection", "mmdet"),
    ("onedl-mmpretrain", "mmpretrain"),
)


def summarize_run(work_dir: Path, num_images: int, score_thr: float, extra: dict) -> dict:
    """Write ``summary.json``, ``predictions.png`` and ``conditioning.png`` into the folder of a run.

    Args:
        work_dir: Folder of a run of ``tools/train.py`` with its checkpoints.
        num_images: Validation images to draw.
        score_thr: Predictions below it are not drawn.
        extra: Entries to add to the summary.

    Returns:
        The summary.

    Raises:
        FileNotFoundError: The folder holds no config, no checkpoint or no
            validation result.
    """
    cfg, checkpoint = run_config(work_dir), last_checkpoint(work_dir)
    metrics = last_metrics(work_dir)
    use_safe_loading()
    model_cfg = deepcopy(cfg.model)
    model_cfg.backbone.init_cfg = None
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmdet")):
        model = MODELS.build(model_cfg)
        dataset = DATASETS.build(cfg.val_dataloader.dataset)
    load_checkpoint(model, str(checkpoint), map_location="cpu")
    model.eval()

    samples = _predict(model, dataset, num_images)
    draw_prediction_sheet(
        samples, str(work_dir / "predictions.png"), dataset.metainfo["classes"], dataset.metainfo["palette"], score_thr
    )
    rows = projection_conditions(model)
    if rows:
        plot_projection_conditions(
            rows, str(work_dir / "conditioning.png"), f"{cfg.model.backbone.type}, {checkpoint.name}"
        )
    summary = dict(metrics, **extra, checkpoint=str(checkpoint), versions=versions())
    (work_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def last_metrics(work_dir: Path) -> dict[str, float]:
    """Return the metrics of the last validation in the newest log of a run that has one.

    Raises:
        FileNotFoundError: No log holds a validation.
    """
    for log in sorted(work_dir.glob("*/vis_data/scalars.json"), reverse=True):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        validations = [line for line in lines if "coco/bbox_mAP" in line]
        if validations:
            return {key: value for key, value in validations[-1].items() if key.startswith("coco/")}
    raise FileNotFoundError(f"{work_dir} holds no log with a validation; let the training finish.")


def versions() -> dict[str, str]:
    """Return the installed versions, by distribution, of what a result depends on."""
    found = {"mmspectral": __version__}
    for names in PACKAGES:
        for name in names:
            try:
                found[name] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


@torch.no_grad()
def _predict(model: torch.nn.Module, dataset, num_images: int) -> list[DetDataSample]:
    """Predict evenly spaced images that have something to find."""
    wanted = [
        i for i in range(len(dataset)) if any(not n["ignore_flag"] for n in dataset.get_data_info(i)["instances"])
    ]
    chosen = wanted[:: max(1, len(wanted) // num_images)][:num_images]
    return [model.test_step(pseudo_collate([dataset[i]]))[0].cpu() for i in chosen]


def run_config(work_dir: Path) -> Config:
    """Return the config that a run left in its folder.

    Raises:
        FileNotFoundError: There is none.
    """
    configs = sorted(work_dir.glob("*.py"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise FileNotFoundError(f"{work_dir} holds no config; is it the work folder of a run of tools/train.py?")
    return Config.fromfile(configs[-1])


def last_checkpoint(work_dir: Path) -> Path:
    """Return the checkpoint of the last epoch in the folder of a run.

    Raises:
        FileNotFoundError: There is none.
    """
    checkpoints = sorted(work_dir.glob("epoch_*.pth"), key=lambda path: int(path.stem.removeprefix("epoch_")))
    if not checkpoints:
        raise FileNotFoundError(f"{work_dir} holds no checkpoint epoch_*.pth; let the training finish.")
    return checkpoints[-1]

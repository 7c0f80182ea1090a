"""Predict on image files and write the results in the formats that other tools read."""

import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import DefaultScope
from rich.progress import track
from torchvision.datasets.folder import IMG_EXTENSIONS

from mmspectral.arguments import host_package
from mmspectral.datasets.coco_ids import image_ids, read_annotations
from mmspectral.errors import UsageError


@dataclass
class Prediction:
    """What :func:`predict` did.

    Attributes:
        images: COCO's table of images: id, file name below the common folder
            of all images, width, height.
        records: One COCO result for each detection, or one entry for each
            classified image.
        unreadable: The images that could not be read.
        category_source: Where the category ids are from; None for a classifier.
    """

    images: list[dict] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    category_source: str | None = None


def find_images(inputs: Iterable[str]) -> list[Path]:
    """Return the image files that are named, lie in a named folder or match a pattern, each once.

    Raises:
        UsageError: An input leads to no image.
    """
    found: dict[Path, None] = {}
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMG_EXTENSIONS)
        elif path.is_file():
            files = [path]
        else:
            files = sorted(Path(file) for file in glob.glob(name, recursive=True) if Path(file).is_file())
        if not files:
            raise UsageError(f"There is no image at {name}; name files, folders with images or patterns.")
        found.update(dict.fromkeys(files))
    return list(found)


def predict(
    cfg: Config,
    checkpoint: str,
    images: Sequence[Path],
    out_dir: Path,
    device: str | None = None,
    batch_size: int = 1,
    score_thr: float = 0.3,
    pictures: bool = True,
    ann_file: str | None = None,
) -> Prediction:
    """Predict on images and write the results.

    A detector writes ``results.json``, COCO's results format with box and mask
    of every detection, and ``images.json`` with the tables that its ids refer
    to. Where there are masks it also writes ``results.segm.json`` without the
    boxes: from records with boxes, COCO's evaluation of masks takes the areas
    of the boxes. A classifier writes ``results.json`` with the best class of
    each image. Pictures lie in ``vis/``.

    Args:
        cfg: Config with the model and its test pipeline.
        checkpoint: Path or URL.
        images: Image files.
        out_dir: Folder for the results; it is made.
        device: torch device; None takes an accelerator if there is one.
        batch_size: Images in one forward pass.
        score_thr: Least score of what is drawn; the JSON files hold everything.
        pictures: Whether to draw.
        ann_file: COCO annotation file with the ids of images and categories.
            See :mod:`mmspectral.datasets.coco_ids` for those without.

    Raises:
        UsageError: An image or a class is not in ``ann_file``, or the model is
            neither mmdet's nor mmpretrain's.
    """
    annotations = read_annotations(ann_file) if ann_file else None
    ids = image_ids(images, annotations)
    predictor = _build_predictor(cfg, checkpoint, device or get_device(), annotations)
    result = Prediction(category_source=getattr(predictor, "category_source", None))
    root = Path(os.path.commonpath([image.parent.resolve() for image in images]))
    numbered = list(zip(images, ids, strict=True))
    batches = [numbered[start : start + batch_size] for start in range(0, len(numbered), batch_size)]
    for batch in track(batches, description="Predicting"):
        read = [(path, number, _read_rgb(path)) for path, number in batch]
        result.unreadable.extend(path for path, _, pixels in read if pixels is None)
        read = [(path, number, pixels) for path, number, pixels in read if pixels is not None]
        samples = predictor([str(path) for path, _, _ in read]) if read else []
        for (path, number, pixels), sample in zip(read, samples, strict=True):
            height, width = pixels.shape[:2]
            name = path.resolve().relative_to(root).as_posix()
            image = dict(id=number, file_name=name, width=width, height=height)
            result.images.append(image)
            result.records.extend(predictor.records(sample, image))
            if pictures:
                predictor.draw(pixels, sample, out_dir / "vis" / _picture_name(name), score_thr)
    _write(out_dir, result, getattr(predictor, "categories", None))
    return result


def _build_predictor(cfg: Config, checkpoint: str, device: str, annotations: dict | None) -> Any:
    host = host_package(cfg)
    # mmpretrain's inferencer builds its pipeline in whatever scope it finds, and mmdet's leaves its own behind.
    with DefaultScope.overwrite_default_scope(host):
        # Each host is imported only for its own models.
        if host == "mmdet":
            from mmspectral.apis.detection import DetectionPredictor

            return DetectionPredictor(cfg, checkpoint, device, annotations)
        from mmspectral.apis.classification import ClassificationPredictor

        return ClassificationPredictor(cfg, checkpoint, device)


def _read_rgb(path: Path) -> np.ndarray | None:
    try:
        pixels = mmcv.imread(str(path))
    except (OSError, cv2.error):
        return None
    return None if pixels is None else mmcv.bgr2rgb(pixels)


def _picture_name(name: str) -> str:
    return name if name.lower().endswith((".jpg", ".jpeg", ".png")) else f"{name}.jpg"


def _write(out_dir: Path, result: Prediction, categories: list[dict] | None) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {"results.json": result.records}
    if categories is not None:
        files["images.json"] = dict(images=result.images, categories=categories, annotations=[])
    masks = [record for record in result.records if "segmentation" in record]
    if masks:
        files["results.segm.json"] = [
            {key: value for key, value in record.items() if key != "bbox"} for record in masks
        ]
    for name, content in files.items():
        (out_dir / name).write_text(json.dumps(content), encoding="utf-8")

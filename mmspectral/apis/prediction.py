"""Predict on image files and write the results in the formats that other tools read."""

import glob
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.config import Config

from mmspectral.arguments import host_package
from mmspectral.datasets.check.coco import entries_with, is_narrow, read_annotations
from mmspectral.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
_PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass
class Prediction:
    """What :func:`predict` did."""

    images: list[dict] = field(default_factory=list)  # COCO's: id, file name below the common folder, width, height
    records: list[dict] = field(default_factory=list)  # one COCO result a detection, or one entry a classified image
    unreadable: list[Path] = field(default_factory=list)  # or so narrow that they vanish when they are resized
    category_source: str | None = None  # where the category ids are from; None for a classifier


def find_images(inputs: Iterable[str]) -> list[Path]:
    """Return the image files that are named, lie in a named folder or match a pattern, each once.

    Raises:
        UsageError: An input leads to no image.
    """
    found: dict[Path, Path] = {}
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
        elif path.is_file():
            files = [path]
        else:
            files = sorted(Path(file) for file in glob.glob(name, recursive=True) if Path(file).is_file())
        if not files:
            raise UsageError(f"There is no image at {name}; name files, folders with images or patterns.")
        for file in files:
            found.setdefault(file.parent.resolve() / file.name, file)
    return list(found.values())


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

    A detector writes ``results.json``, COCO's results format with box and mask of every detection, ``images.json`` with
    the tables that its ids refer to, and, where there are masks, ``results.segm.json`` without the boxes, whose areas
    COCO's evaluation of masks would take. A classifier writes ``results.json`` with the best class of each image.
    Pictures lie in ``vis/``.

    Args:
        cfg: Config with the model and its test pipeline.
        checkpoint: Path or URL.
        images: Image files.
        out_dir: Folder for the results; it is made.
        device: torch device; None takes an accelerator if there is one.
        batch_size: Images in one forward pass.
        score_thr: Least score of what is drawn; the JSON files hold everything.
        pictures: Whether to draw.
        ann_file: COCO annotation file with the ids of images and categories. Without it see :func:`image_ids` and
            :func:`mmspectral.apis.detection.category_ids`.

    Raises:
        UsageError: An image or a class is not in ``ann_file``, or the model is neither mmdet's nor mmpretrain's.
    """
    import torch
    from mmengine.device import get_device
    from mmengine.registry import DefaultScope
    from rich.progress import track

    from mmspectral.engine import check_config

    annotations = read_annotations(ann_file) if ann_file else None
    numbered = list(zip(images, image_ids(images, annotations), strict=True))
    device, host = device or get_device(), host_package(cfg)
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"There is no GPU that torch can use for --device {device}; leave it out, or say cpu.")
    check_config(cfg)
    # mmpretrain's inferencer builds its pipeline in whatever scope it finds, and mmdet's leaves its own behind.
    with DefaultScope.overwrite_default_scope(host):
        if host == "mmdet":  # each host is imported only for its own models
            from mmspectral.apis.detection import Detector

            predictor = Detector(cfg, checkpoint, device, annotations)
        else:
            from mmspectral.apis.classification import Classifier

            predictor = Classifier(cfg, checkpoint, device)
    result = Prediction(category_source=predictor.category_source)
    root = Path(os.path.commonpath([image.parent.resolve() for image in images]))
    batches = [numbered[start : start + batch_size] for start in range(0, len(numbered), batch_size)]
    for batch in track(batches, description="Predicting"):
        read = [(path, number, _read_rgb(path)) for path, number in batch]
        result.unreadable.extend(path for path, _, pixels in read if pixels is None)
        read = [(path, number, pixels) for path, number, pixels in read if pixels is not None]
        samples = predictor([str(path) for path, _, _ in read]) if read else []
        for (path, number, pixels), sample in zip(read, samples, strict=True):
            height, width = pixels.shape[:2]
            name = (path.parent.resolve() / path.name).relative_to(root).as_posix()  # a link is not followed
            result.images.append(dict(id=number, file_name=name, width=width, height=height))
            result.records.extend(predictor.records(sample, result.images[-1]))
            if pictures:
                picture = name if name.lower().endswith(_PICTURE_SUFFIXES) else f"{name}.jpg"
                predictor.draw(pixels, sample, out_dir / "vis" / picture, score_thr)
    _write(out_dir, result, predictor.categories)
    return result


def _read_rgb(path: Path) -> "np.ndarray | None":
    import cv2
    import mmcv

    try:
        pixels = mmcv.imread(str(path))
    except (OSError, cv2.error):
        return None
    return None if pixels is None or is_narrow(*pixels.shape[:2]) else mmcv.bgr2rgb(pixels)


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


def image_ids(images: Sequence[Path], annotations: dict | None = None) -> list[int]:
    """Return the COCO id of each image.

    Args:
        images: Paths.
        annotations: Contents of an annotation file, which knows the ids by file name. Without it an image whose name is
            a number has that number, as COCO's 000000000139.jpg has 139; the others are counted from 1, past the
            numbers that are taken.

    Raises:
        UsageError: An image is not in ``annotations``, or more than once.
    """
    if annotations is not None:
        return _annotated_ids(images, annotations)
    ids: dict[Path, int] = {}
    for image in images:
        if image.stem.isdecimal() and int(image.stem) not in ids.values():
            ids[image] = int(image.stem)
    taken = set(ids.values())
    free = (number for number in range(1, len(images) + len(taken) + 1) if number not in taken)
    return [ids[image] if image in ids else next(free) for image in images]


def _annotated_ids(images: Sequence[Path], annotations: dict) -> list[int]:
    by_name = defaultdict(list)
    for entry in entries_with(annotations, "images", "file_name"):
        by_name[Path(entry["file_name"]).name].append(entry)
    ids = []
    for image in images:
        entries = by_name[image.name]
        if len(entries) > 1:
            # Several folders of the dataset have an image of this name.
            path = image.resolve().as_posix()
            entries = [entry for entry in entries if path.endswith("/" + entry["file_name"].lstrip("/"))]
        if len(entries) != 1:
            times = "more than once" if entries else "not"
            raise UsageError(f"{image} is {times} in the annotation file; predict without --ann-file to number freely.")
        ids.append(entries[0]["id"])
    return ids

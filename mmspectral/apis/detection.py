"""Predictions of mmdet's detectors as COCO results."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mmdet.apis import DetInferencer
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config, ConfigDict

from mmspectral.checkpoints import fit_whole, read_checkpoint
from mmspectral.datasets.check.coco import entries_with, read_annotations
from mmspectral.engine.testing import for_inferencer
from mmspectral.errors import UsageError

# COCO numbered 91 categories and annotated 80 of them; these are the others.
_NOT_ANNOTATED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_CATEGORY_IDS = [number for number in range(1, 91) if number not in _NOT_ANNOTATED]


class _Inferencer(DetInferencer):
    """mmdet's inferencer, but it runs no code of a checkpoint, and one without class names gets those of the config."""

    def __init__(self, cfg: Config, checkpoint: str, device: str):
        self.checkpoint = checkpoint
        super().__init__(cfg, device=device, show_progress=False)

    def _load_weights_to_model(self, model, checkpoint, cfg):
        checkpoint = read_checkpoint(self.checkpoint)
        meta = checkpoint.get("meta", {})
        if not {"dataset_meta", "CLASSES"} & meta.keys():
            metainfo = DATASETS.build(ConfigDict(cfg.test_dataloader.dataset, lazy_init=True)).metainfo
            checkpoint = {
                "state_dict": checkpoint.get("state_dict", checkpoint),
                "meta": {**meta, "dataset_meta": metainfo},
            }
        weights, _ = fit_whole(model, checkpoint, self.checkpoint)
        super()._load_weights_to_model(model, {**checkpoint, "state_dict": weights.state_dict()}, cfg)


class Detector:
    """Predict with a detector; each detection becomes one COCO record.

    Args:
        cfg: Config with the model and its test pipeline.
        checkpoint: Path or URL.
        device: torch device.
        annotations: Contents of a COCO annotation file for the category ids. None takes the config's, if it lies on
            this machine.
    """

    def __init__(self, cfg: Config, checkpoint: str, device: str, annotations: dict | None = None):
        cfg = for_inferencer(cfg)
        cfg.setdefault("visualizer", dict(type="mmdet.DetLocalVisualizer"))
        # Pictures go where the caller says, not to the backends of a training run.
        cfg.visualizer["vis_backends"] = None
        self.inferencer = _Inferencer(cfg, checkpoint, device)
        classes = tuple(self.inferencer.model.dataset_meta["classes"])
        if annotations is None:
            annotations = _config_annotations(cfg)
        self.category_ids, self.category_source = category_ids(classes, annotations)
        self.categories = [dict(id=number, name=name) for number, name in zip(self.category_ids, classes, strict=True)]

    def __call__(self, images: Sequence[str]) -> list:
        """Return one mmdet data sample for each image, computed as one batch."""
        return self.inferencer(list(images), batch_size=len(images), return_datasamples=True)["predictions"]

    def records(self, sample, image: dict) -> list[dict]:
        """Return COCO records, with the box as x, y, width, height in pixels and masks as run-length codes."""
        found = self.inferencer.pred2dict(sample)
        masks = found.get("masks", [None] * len(found["labels"]))
        records = []
        for label, score, (x1, y1, x2, y2), mask in zip(
            found["labels"], found["scores"], found["bboxes"], masks, strict=True
        ):
            record = dict(image_id=image["id"], category_id=self.category_ids[label], score=score)
            record["bbox"] = [x1, y1, x2 - x1, y2 - y1]
            if mask is not None:
                record["segmentation"] = dict(size=[int(length) for length in mask["size"]], counts=mask["counts"])
            records.append(record)
        return records

    def draw(self, image: np.ndarray, sample, file: Path, score_thr: float) -> None:
        """Write a picture with the detections that score at least ``score_thr``; ``image`` is RGB."""
        self.inferencer.visualizer.add_datasample(
            file.name, image, sample, draw_gt=False, pred_score_thr=score_thr, out_file=str(file)
        )


def _config_annotations(cfg: Config) -> dict | None:
    dataset = cfg.test_dataloader.dataset
    if not dataset.get("ann_file"):
        return None
    path = Path(dataset.get("data_root") or "", dataset.ann_file)
    return read_annotations(path) if path.suffix == ".json" and path.is_file() else None


def category_ids(classes: Sequence[str], annotations: dict | None = None) -> tuple[list[int], str]:
    """Return the COCO id of each class, and a few words on where the ids are from.

    Args:
        classes: Names, in the order of the model's outputs. COCO's 80 have COCO's own ids, others are counted from 1.
        annotations: Contents of an annotation file, which knows the ids by name.

    Raises:
        UsageError: A class is not in ``annotations``.
    """
    if annotations is not None:
        ids = {category["name"]: category["id"] for category in entries_with(annotations, "categories", "name")}
        missing = [name for name in classes if name not in ids]
        if missing:
            raise UsageError(
                f"The annotation file has no category named {', '.join(missing)}, which the model predicts."
            )
        return [ids[name] for name in classes], "from the annotation file"
    if tuple(classes) == CocoDataset.METAINFO["classes"]:
        return COCO_CATEGORY_IDS, "COCO's own"
    return list(range(1, len(classes) + 1)), "counted from 1"

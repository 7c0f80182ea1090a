"""Predictions of mmpretrain's classifiers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mmengine.config import Config
from mmpretrain import ImageClassificationInferencer
from mmpretrain.visualization import UniversalVisualizer

from mmspectral.checkpoints import fit_whole, read_checkpoint
from mmspectral.engine.testing import for_inferencer


class Classifier:
    """Predict with a classifier; each image becomes one record with its best class.

    Args:
        cfg: Config with the model and its test pipeline.
        checkpoint: Path or URL.
        device: torch device.
    """

    category_source = categories = None  # of COCO's format

    def __init__(self, cfg: Config, checkpoint: str, device: str):
        loaded = read_checkpoint(checkpoint)
        cfg = for_inferencer(cfg)
        meta = loaded.get("meta", {})
        names = meta.get("dataset_meta", {}).get("classes") or meta.get("CLASSES")
        self.inferencer = ImageClassificationInferencer(cfg, pretrained=False, device=device, classes=names)
        weights, _ = fit_whole(self.inferencer.model, loaded, checkpoint)
        self.inferencer.model.load_state_dict(weights.state_dict(), strict=False)
        self.classes = self.inferencer.classes or cfg.test_dataloader.dataset.get("metainfo", {}).get("classes")
        self.visualizer = UniversalVisualizer()

    def __call__(self, images: Sequence[str]) -> list:
        """Return one mmpretrain data sample for each image, computed as one batch."""
        (batch,) = self.inferencer.preprocess(list(images), batch_size=len(images))
        return self.inferencer.forward(batch)

    def records(self, sample, image: dict) -> list[dict]:
        """Return one record; the class has no name where neither the checkpoint nor the config has names."""
        index = int(sample.pred_score.argmax())
        name, score = self.classes[index] if self.classes else None, float(sample.pred_score[index])
        return [dict(file_name=image["file_name"], class_index=index, class_name=name, score=score)]

    def draw(self, image: np.ndarray, sample, file: Path, score_thr: float) -> None:
        """Write a picture with the best class if it scores at least ``score_thr``; ``image`` is RGB."""
        self.visualizer.visualize_cls(
            image,
            sample,
            classes=self.classes,
            draw_gt=False,
            draw_pred=float(sample.pred_score.max()) >= score_thr,
            name=file.name,
            out_file=str(file),
        )

"""One picture of several images with their ground truth and predicted masks, for a quick look."""

from collections.abc import Sequence

import mmcv
import numpy as np
from mmdet.structures import DetDataSample
from mmdet.visualization import DetLocalVisualizer
from mmengine.structures import InstanceData


def draw_prediction_sheet(
    samples: Sequence[DetDataSample],
    path: str,
    classes: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
    score_thr: float = 0.5,
    columns: int = 4,
    tile: int = 320,
) -> None:
    """Draw pairs of rows, ground truth above predictions, and write the sheet.

    Args:
        samples: Predictions with ``img_path`` and ``gt_instances``.
        path: Picture to write.
        classes: Class names.
        palette: One RGB colour per class.
        score_thr: Predictions below it are not drawn.
        columns: Images per row.
        tile: Side of each image on the sheet, in pixels.
    """
    visualizer = DetLocalVisualizer()
    visualizer.dataset_meta = dict(classes=tuple(classes), palette=list(palette))
    rows = []
    for start in range(0, len(samples), columns):
        chunk = samples[start : start + columns]
        for prediction in (False, True):
            tiles = [_draw(visualizer, sample, prediction, score_thr, tile) for sample in chunk]
            tiles += [np.full_like(tiles[0], 255)] * (columns - len(tiles))
            rows.append(np.concatenate([np.pad(t, ((3, 3), (3, 3), (0, 0)), constant_values=255) for t in tiles], 1))
    mmcv.imwrite(mmcv.rgb2bgr(np.concatenate(rows)), str(path))


def _draw(visualizer: DetLocalVisualizer, sample: DetDataSample, prediction: bool, score_thr: float, tile: int):
    """Draw one image, enlarged to ``tile`` so that labels are legible."""
    image = mmcv.imread(sample.img_path, channel_order="rgb")
    height, width = image.shape[:2]
    factor = tile / max(height, width)
    size = (round(width * factor), round(height * factor))
    instances = sample.pred_instances if prediction else sample.gt_instances
    if prediction:
        instances = instances[instances.scores >= score_thr]
    drawn = _enlarged(instances.numpy(), size, factor)
    chosen = DetDataSample(pred_instances=drawn) if prediction else DetDataSample(gt_instances=drawn)
    visualizer.add_datasample(
        "sheet", mmcv.imresize(image, size), chosen, draw_gt=not prediction, draw_pred=prediction, pred_score_thr=0.0
    )
    picture = visualizer.get_image()
    canvas = np.full((tile, tile, 3), 255, np.uint8)
    canvas[: size[1], : size[0]] = picture
    return canvas


def _enlarged(instances: InstanceData, size: tuple[int, int], factor: float) -> InstanceData:
    masks = instances.masks if isinstance(instances.masks, np.ndarray) else instances.masks.to_ndarray()
    resized = [mmcv.imresize(mask.astype(np.uint8), size, interpolation="nearest") for mask in masks]
    result = InstanceData(
        bboxes=np.asarray(getattr(instances.bboxes, "tensor", instances.bboxes)) * factor,
        labels=instances.labels,
        masks=np.stack(resized).astype(bool) if resized else np.zeros((0, size[1], size[0]), bool),
    )
    if "scores" in instances:
        result.scores = instances.scores
    return result

"""One picture of several images with their ground truth and predicted masks, for a quick look."""

from collections.abc import Sequence

import mmcv
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData

ROWS = ("ground truth", "prediction")
_OPACITY = 0.6


def draw_prediction_sheet(
    samples: Sequence[DetDataSample],
    path: str,
    classes: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
    score_thr: float = 0.5,
    columns: int = 4,
    tile: int = 320,
) -> None:
    """Draw pairs of rows, ground truth above predictions, with one colour per class, and write the sheet.

    Args:
        samples: Predictions with ``img_path`` and ``gt_instances``.
        path: Picture to write.
        classes: Class names.
        palette: One RGB colour per class.
        score_thr: Predictions below it are not drawn.
        columns: Images per row.
        tile: Side of each image on the sheet, in pixels.
    """
    colours = np.array(palette) / 255
    rows = -(-len(samples) // columns) * len(ROWS)
    figure = Figure(figsize=(columns * tile / 100, rows * tile / 100 + 0.6), dpi=100, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[], frame_on=False)
    for index, sample in enumerate(samples):
        row, column = len(ROWS) * (index // columns), index % columns
        image = mmcv.imread(sample.img_path, channel_order="rgb")
        predicted = sample.pred_instances[sample.pred_instances.scores >= score_thr]
        for axes, instances in zip(grid[row : row + len(ROWS), column], (sample.gt_instances, predicted), strict=True):
            _draw(axes, image, instances.numpy(), colours)
    for index, axes in enumerate(grid[:, 0]):
        axes.set_ylabel(ROWS[index % len(ROWS)], fontsize="x-large")
    patches = [Patch(color=colour, label=name) for name, colour in zip(classes, colours, strict=True)]
    title = f"predictions with a score of at least {score_thr:g}, shown as a number"
    figure.legend(handles=patches, loc="outside upper center", ncols=min(len(patches), 10), title=title)
    figure.savefig(path)


def _draw(axes: Axes, image: np.ndarray, instances: InstanceData, colours: np.ndarray) -> None:
    """Draw one image [H, W, 3] with the masks, the boxes and, where there are any, the scores of its instances."""
    masks = instances.masks if isinstance(instances.masks, np.ndarray) else instances.masks.to_ndarray()
    boxes = np.asarray(getattr(instances.bboxes, "tensor", instances.bboxes))
    picture = image / 255
    for label, mask in zip(instances.labels, masks.astype(bool), strict=True):
        grey = picture[mask].mean(axis=1, keepdims=True)  # so that an object has no colour but that of its class
        picture[mask] = (1 - _OPACITY) * grey + _OPACITY * colours[label]
    axes.imshow(picture)
    for index, (label, (x1, y1, x2, y2)) in enumerate(zip(instances.labels, boxes, strict=True)):
        axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=colours[label], linewidth=2))
        if "scores" in instances:
            style = dict(facecolor=colours[label], edgecolor="none", pad=1)
            axes.text(x1, y1, f"{instances.scores[index]:.2f}", color="white", fontsize="small", va="top", bbox=style)

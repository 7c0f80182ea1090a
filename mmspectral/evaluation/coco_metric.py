"""COCO's twelve numbers, for boxes and masks."""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import mmdet.evaluation
from mmdet.datasets.api_wrappers import COCO
from mmengine.logging import print_log
from terminaltables import AsciiTable

from mmspectral.datasets.check.coco import CocoUse, check_content
from mmspectral.datasets.check.report import SplitReport
from mmspectral.errors import UsageError
from mmspectral.registry import METRICS

# The entries of `COCOeval.stats` by names of mmdet, which has other numbers of detections, of ours, and of COCO.
_MMDET_ITEMS = (
    *("mAP", "mAP_50", "mAP_75", "mAP_s", "mAP_m", "mAP_l"),
    *("AR@100", "AR@300", "AR@1000", "AR_s@1000", "AR_m@1000", "AR_l@1000"),
)
_ITEMS = (*_MMDET_ITEMS[:6], "AR@1", "AR@10", "AR@100", "AR_s@100", "AR_m@100", "AR_l@100")
_COCO_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
# The area ranges of the twelve entries, in pixels.
_ALL, _SMALL, _MEDIUM, _LARGE = (0, 1e10), (0, 32**2), (32**2, 96**2), (96**2, 1e10)
_AREA_RANGES = (_ALL, _ALL, _ALL, _SMALL, _MEDIUM, _LARGE) * 2
_NOT_AVAILABLE = -1.0


def _base_metric() -> type:
    """Return mmdet's faster metric if it and the package behind it are there, else its usual one."""
    if importlib.util.find_spec("faster_coco_eval") is not None:
        return getattr(mmdet.evaluation, "FasterCocoMetric", mmdet.evaluation.CocoMetric)
    return mmdet.evaluation.CocoMetric


def _table(metric: str, values: Sequence[float]) -> str:
    shown = ["n/a" if value == _NOT_AVAILABLE else f"{value:.3f}" for value in values]
    text = AsciiTable([[metric, *_COCO_NAMES], ["", *shown]]).table
    return f"{text}\nn/a: no ground truth in that area range." if "n/a" in shown else text


@METRICS.register_module()
class CocoMetric(_base_metric()):
    """mmdet's COCO metric, set up as COCO defines it and reporting all twelve numbers.

    mmdet's metric counts up to (100, 300, 1000) detections per image and reports six numbers. This one counts (1, 10,
    100), as COCO does, and returns ``bbox_mAP``, ``_mAP_50``, ``_mAP_75``, ``_mAP_s``, ``_mAP_m``, ``_mAP_l``,
    ``_AR@1``, ``_AR@10``, ``_AR@100``, ``_AR_s@100``, ``_AR_m@100`` and ``_AR_l@100``, the same for ``segm``, each
    rounded to three decimals, under the prefix ``coco/``. It logs them in a table under COCO's own names. Where an area
    range has no ground truth, the value is COCO's -1 and the table shows ``n/a``. A run without any detection scores 0.

    Ground truth comes from ``ann_file``, else from ``ann_file`` in the dataset's metainfo, which
    :class:`mmspectral.datasets.ShapesDataset` provides. Without both, mmdet rebuilds it from the data samples: the
    areas are then those of boxes and the crowd regions are lost, about which a warning is logged.

    Args:
        ann_file: Path of the annotations in COCO's format.
        metric: ``"bbox"``, ``"segm"`` or a list of them.
        **kwargs: Passed to mmdet's metric, such as ``classwise``, ``format_only``, ``outfile_prefix``,
            ``backend_args``.

    Raises:
        ValueError: ``metric`` is not as described.
        UsageError: An annotation cannot be evaluated, or is misread (when the evaluator gets the dataset's metainfo).
    """

    def __init__(
        self,
        ann_file: str | None = None,
        metric: str | Sequence[str] = ("bbox", "segm"),
        **kwargs: Any,
    ) -> None:
        metrics = [metric] if isinstance(metric, str) else list(metric)
        if not metrics or not set(metrics) <= {"bbox", "segm"}:
            raise ValueError(
                f"metric is {metric!r}; mmspectral.CocoMetric knows 'bbox' and 'segm'. "
                "For proposals take mmdet.CocoMetric."
            )
        super().__init__(
            ann_file=ann_file, metric=metrics, proposal_nums=(1, 10, 100), metric_items=_MMDET_ITEMS, **kwargs
        )

    @property
    def dataset_meta(self) -> dict | None:
        """Metainfo of the dataset; as it is set, before the first batch, the ground truth is checked against it."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, meta: dict) -> None:
        self._dataset_meta = meta
        if self._coco_api is None and meta.get("ann_file") is not None:
            self._coco_api = COCO(meta["ann_file"])
        if self._coco_api is not None and not self.format_only and "classes" in meta:
            self._require_sound(self._coco_api, meta["classes"])

    def _require_sound(self, coco: Any, classes: Sequence[str]) -> None:
        """Refuse what COCO's evaluator would misread; number the annotations from 1, as it takes 0 for no match."""
        report = SplitReport("ground truth")
        use = CocoUse(tuple(classes), training=False, evaluated=frozenset(self.metrics))
        check_content(report, coco.dataset, use)
        if report.errors:
            raise UsageError("The annotations cannot be evaluated: " + " ".join(report.errors))
        annotations = coco.dataset.get("annotations", [])
        for number, annotation in enumerate(annotations, 1):
            annotation["id"] = number
            annotation.setdefault("iscrowd", 0)
        coco.anns = {annotation["id"]: annotation for annotation in annotations}

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Collect the predictions of one batch, as mmdet does, and say once where there is no annotation file."""
        if self._coco_api is None and not self.results:
            print_log(
                "CocoMetric has no ann_file: ground truth is rebuilt from the data samples, with box areas and "
                "without crowd regions, so the numbers are not COCO's. Set val_evaluator.ann_file.",
                logger="current",
                level=logging.WARNING,
            )
        super().process(data_batch, data_samples)

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Return the numbers, keyed ``{metric}_{item}``, and log them as a table for each metric."""
        if self._coco_api is not None:  # a dataset may use a part of the file
            seen = {truth["img_id"] for truth, _ in results}
            self.img_ids = [number for number in self._coco_api.get_img_ids() if number in seen]
        found = super().compute_metrics(results)
        if self.format_only:
            return found
        scores = dict(found)
        for metric in self.metrics:
            keys = [f"{metric}_{item}" for item in _MMDET_ITEMS]
            # mmdet logs an error and returns nothing for a set without detections.
            values = [scores.pop(key) for key in keys] if keys[0] in scores else self._without_detections()
            print_log(f"\n{_table(metric, values)}", logger="current")
            scores.update({f"{metric}_{item}": value for item, value in zip(_ITEMS, values, strict=True)})
        return scores

    def _without_detections(self) -> list[float]:
        """Return the twelve numbers that COCO's evaluator gives to no detections: 0, or -1 without ground truth."""
        found = self._coco_api.loadAnns(self._coco_api.getAnnIds(imgIds=self.img_ids, catIds=self.cat_ids))
        areas = [annotation["area"] for annotation in found if not annotation.get("iscrowd")]
        return [0.0 if any(low <= area <= high for area in areas) else _NOT_AVAILABLE for low, high in _AREA_RANGES]

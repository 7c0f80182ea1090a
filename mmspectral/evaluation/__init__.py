"""Metrics of scope ``mmspectral``."""

from mmspectral.evaluation.coco_metric import CocoMetric

__all__ = ["CocoMetric"]

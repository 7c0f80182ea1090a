"""Datasets of scope ``mmspectral``."""

from mmspectral.datasets.shapes import ShapesDataset, shapes_annotation_file

__all__ = ["ShapesDataset", "shapes_annotation_file"]

"""Datasets and transforms of scope ``mmspectral``, and the check of a config's data in :mod:`.check`.

The dataset of shapes needs mmdet, which a classifier's run goes without, so that it is imported when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmspectral.datasets.shapes import ShapesDataset, shapes_annotation_file

__all__ = ["ShapesDataset", "shapes_annotation_file"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from mmspectral.datasets import shapes

        return getattr(shapes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Floor 4: the demo set of shapes, the image loader, and the check of a config's data before training.

The demo set is imported when it is first used, as only that needs mmdet.
"""

__all__ = ["ShapesDataset", "shapes_annotation_file"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mmspectral.datasets import shapes

    return getattr(shapes, name)

"""Floor 4: the demo set of shapes, the image loader, and the check of a config's data before training.

Names are imported when they are first used, as the demo set needs mmdet.
"""

from mmspectral.lazy import lazy_names

_NAMES = {
    "check": ("DatasetReport", "SplitReport", "check_before_training", "check_dataset"),
    "shapes": ("ShapesDataset",),
}
__getattr__, __all__ = lazy_names(__name__, _NAMES)

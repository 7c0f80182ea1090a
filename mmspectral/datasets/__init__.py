"""Floor 4: the demo set of shapes, the image loader, and the check of a config's data before training.

Names are imported when they are first used, as the demo set needs mmdet.
"""

import importlib

_NAMES = {
    "check": ("DatasetReport", "SplitReport", "check_before_training", "check_dataset"),
    "shapes": ("ShapesDataset", "shapes_annotation_file"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

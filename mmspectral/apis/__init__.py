"""Floor 6: what a tool or a notebook calls: predictions on images without a dataset, and export.

Names are imported when they are first used, as export loads the backbones.
"""

import importlib

_NAMES = {
    "exporter": ("ExportReport", "export"),
    "prediction": ("Prediction", "find_images", "predict"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

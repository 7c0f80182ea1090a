"""Floor 6: what a tool or a notebook calls: predictions on images without a dataset, and export.

Names are imported when they are first used, as export loads the backbones.
"""

from mmspectral.lazy import lazy_names

_NAMES = {
    "exporter": ("ExportReport", "export"),
    "prediction": ("Prediction", "find_images", "predict"),
}
__getattr__, __all__ = lazy_names(__name__, _NAMES)

"""Settings of a dataset that are of another kind than mmdet and mmpretrain can read."""

import os
from collections.abc import Mapping
from typing import Any

from mmspectral.datasets.check.segmentation import are_numbers


def wrong_classes(classes: Any) -> list[str]:
    """Say whether these cannot be the names of classes."""
    if classes is None or (isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)):
        return []
    if isinstance(classes, str):
        return [f"classes is the string {classes!r}; write metainfo=dict(classes=({classes!r},))."]
    return [_sentence("classes", classes, "a tuple of names")]


def wrong_settings(dataset: Any, images: str) -> list[str]:
    """Say which settings of a dataset of mmdet or mmpretrain have values that it cannot read.

    Args:
        dataset: Built with ``lazy_init=True``, so that it has not read them yet.
        images: Key of the folder of the images in its ``data_prefix``.
    """
    filters, prefix, indices = dataset.filter_cfg or {}, dataset.data_prefix, dataset._indices
    min_size = filters.get("min_size", 0) if isinstance(filters, Mapping) else 0
    has_images = isinstance(prefix, Mapping) and images in prefix and all(map(_is_path, prefix.values()))
    numbers = indices if isinstance(indices, (list, tuple)) else [0 if indices is None else indices]
    rules = (
        (_is_path(dataset.ann_file), "ann_file", dataset.ann_file, "a path"),
        (has_images, "data_prefix", prefix, f"a dict of paths with the key {images!r}"),
        (isinstance(filters, Mapping), "filter_cfg", filters, "a dict"),
        (are_numbers([min_size]), "min_size", min_size, "a number of pixels"),
        (
            all(isinstance(n, int) for n in numbers),
            "indices",
            indices,
            "a number of images or their indices",
        ),
    )
    return [_sentence(name, value, wanted) for holds, name, value, wanted in rules if not holds]


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _sentence(name: str, value: Any, wanted: str) -> str:
    return f"{name} is {value!r}; it must be {wanted}."

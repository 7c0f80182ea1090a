"""The image and category ids that COCO's results format asks for."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mmspectral.errors import UsageError

# COCO numbered 91 categories and annotated 80 of them; these are the others.
_NOT_ANNOTATED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_CATEGORY_IDS = tuple(number for number in range(1, 91) if number not in _NOT_ANNOTATED)


def read_annotations(path: str | Path) -> dict:
    """Return the contents of a COCO annotation file.

    Raises:
        UsageError: There is no such file, or it is no such file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The annotation file {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not {"images", "categories"} <= content.keys():
        raise UsageError(f"{path} is no COCO annotation file: it has no lists 'images' and 'categories'.")
    return content


def image_ids(images: Sequence[Path], annotations: dict | None = None) -> list[int]:
    """Return the COCO id of each image.

    Args:
        images: Paths.
        annotations: Contents of an annotation file, which knows the ids by
            file name. Without it an image whose name is a number has that
            number, as COCO's 000000000139.jpg has 139; the others are counted
            from 1, past the numbers that are taken.

    Raises:
        UsageError: An image is not in ``annotations``, or more than once.
    """
    if annotations is not None:
        return _annotated_ids(images, annotations)
    ids: dict[Path, int] = {}
    for image in images:
        if image.stem.isdecimal() and int(image.stem) not in ids.values():
            ids[image] = int(image.stem)
    taken = set(ids.values())
    free = (number for number in range(1, len(images) + len(taken) + 1) if number not in taken)
    return [ids[image] if image in ids else next(free) for image in images]


def _annotated_ids(images: Sequence[Path], annotations: dict) -> list[int]:
    by_name = defaultdict(list)
    for entry in annotations["images"]:
        by_name[Path(entry["file_name"]).name].append(entry)
    ids = []
    for image in images:
        entries = by_name[image.name]
        if len(entries) > 1:
            # Several folders of the dataset have an image of this name.
            path = image.resolve().as_posix()
            entries = [entry for entry in entries if path.endswith("/" + entry["file_name"].lstrip("/"))]
        if len(entries) != 1:
            times = "more than once" if entries else "not"
            raise UsageError(f"{image} is {times} in the annotation file; predict without --ann-file to number freely.")
        ids.append(entries[0]["id"])
    return ids


def category_ids(
    classes: Sequence[str], annotations: dict | None = None, coco_classes: Sequence[str] = ()
) -> tuple[list[int], str]:
    """Return the COCO id of each class, and a few words on where the ids are from.

    Args:
        classes: Names, in the order of the model's outputs.
        annotations: Contents of an annotation file, which knows the ids by
            name.
        coco_classes: The names of COCO's 80 classes; a model of exactly these
            gets COCO's own ids. Other models count from 1.

    Raises:
        UsageError: A class is not in ``annotations``.
    """
    if annotations is not None:
        ids = {category["name"]: category["id"] for category in annotations["categories"]}
        missing = [name for name in classes if name not in ids]
        if missing:
            raise UsageError(
                f"The annotation file has no category named {', '.join(missing)}, which the model predicts."
            )
        return [ids[name] for name in classes], "from the annotation file"
    if tuple(classes) == tuple(coco_classes):
        return list(COCO_CATEGORY_IDS), "COCO's own"
    return list(range(1, len(classes) + 1)), "counted from 1"

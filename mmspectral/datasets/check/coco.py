"""COCO annotation files and the masks in them: what is wrong, and what of it a detector gets to see."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspectral.datasets.check.report import SplitReport, Tally, check_files
from mmspectral.errors import UsageError

LIMIT = 1e9  # no image has as many pixels in a row; float32 boxes cannot resolve it either
_NUMBERS = {int, float}
# What mmdet does about a problem: raise, leave the object out, or train with it all the same.
STOPS, DROPPED, KEPT = "stops", "dropped", "kept"
# COCO's area ranges in square pixels, by the end of the names of their metrics.
_RANGES = {"small (AP_s)": (0, 32**2), "medium (AP_m)": (32**2, 96**2), "large (AP_l)": (96**2, LIMIT**2)}


@dataclass(frozen=True)
class CocoUse:
    """How a dataset uses its annotation file."""

    classes: tuple[str, ...]
    own_classes: bool = False  # the names are those of the dataset's type, as ``metainfo`` gives none
    training: bool = True  # annotations are filtered and needed
    needs_masks: bool = False  # the pipeline loads masks
    filter_empty: bool = False  # images without annotations are left out
    min_size: float = 0  # shortest side of an image that is used, in pixels
    indices: int | Sequence[int] | None = None


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


def check_coco(report: SplitReport, ann_file: str, folder: str | None, use: CocoUse) -> None:
    """Check an annotation file and, in ``folder`` if it is not None, its images; fill ``report``."""
    try:
        content = read_annotations(ann_file)
    except UsageError as error:
        report.errors.append(str(error))
        return
    lists = {name: content.get(name, []) for name in ("images", "annotations", "categories")}
    wrong = [name for name, value in lists.items() if not isinstance(value, list)]
    if wrong:
        report.errors.append(f"{', '.join(wrong)} of {ann_file} must be lists.")
        return
    errors, warnings = Tally(), Tally()
    categories = _categories(lists["categories"], report, errors, use)
    images = _images(lists["images"], errors, warnings)
    objects = _Objects(use, categories, images, errors, warnings)
    for annotation in lists["annotations"]:
        objects.add(annotation)
    used = _used_images(images, objects.annotated, use)
    report.errors += errors.sentences()
    report.warnings += warnings.sentences()
    _summarize(report, lists, images, objects, used, use)
    if folder is not None:
        check_files(report, folder, (images[number]["file_name"] for number in used))


def _categories(entries: list, report: SplitReport, errors: Tally, use: CocoUse) -> dict[Any, str]:
    """Return the names of the categories by id, in the order of the file, and compare them with the classes."""
    names: dict[Any, str] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get("name"), str):
            errors.add("categories are not dict(id=..., name=...)", entry)
        elif entry["id"] in names or entry["name"] in names.values():
            errors.add("categories have the id or name of another one", entry["name"])
        else:
            names[entry["id"]] = entry["name"]
    numbers = sorted(number for number in names if isinstance(number, int))
    if numbers:
        gaps = numbers[-1] - numbers[0] + 1 != len(numbers)
        report.counts["category ids"] = f"{numbers[0]}..{numbers[-1]}{' with gaps' if gaps else ''}"
    missing = [name for name in use.classes if name not in names.values()]
    in_file = [name for name in names.values() if name in use.classes]
    if missing:
        cause = "which are those of the dataset's type, as it has no metainfo. " if use.own_classes else ""
        report.errors.append(
            f"{len(missing)} of {len(use.classes)} classes are no category of the annotation file: "
            f"{_listed(missing)}; {cause}the file has {_listed(list(names.values()))}. "
            f"Set metainfo=dict(classes=(...)) of this dataset to names in the file."
        )
    elif in_file != list(use.classes) and sorted(in_file) == sorted(use.classes):
        report.errors.append(
            "The classes are in another order than the file's categories, by which mmdet numbers them, so that "
            f"predictions would get wrong names. Set metainfo=dict(classes=...) to {tuple(in_file)!r}."
        )
    return names


def _images(entries: list, errors: Tally, warnings: Tally) -> dict[Any, dict]:
    images: dict[Any, dict] = {}
    names = set()
    for entry in entries:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            errors.add("images have no id", entry)
            continue
        if not isinstance(entry.get("file_name"), str) or not entry["file_name"]:
            errors.add("images have no file_name", entry["id"])
            continue
        if not all(are_numbers([entry.get(side)]) and entry[side] > 0 for side in ("height", "width")):
            errors.add("images have no positive height and width", entry["id"])
            continue
        if entry["id"] in images:
            errors.add("images have the id of another one", entry["id"])
        if entry["file_name"] in names:
            warnings.add("images have the file_name of another one", entry["file_name"])
        names.add(entry["file_name"])
        images[entry["id"]] = entry
    return images


class _Objects:
    """Goes through the annotations by the rules of mmdet's ``CocoDataset`` and ``LoadAnnotations``."""

    def __init__(self, use: CocoUse, categories: dict, images: dict, errors: Tally, warnings: Tally) -> None:
        self.use, self.categories, self.images = use, categories, images
        self.errors, self.warnings = errors, warnings
        self.annotated: set = set()  # images with an annotation of a class, be it usable or not
        self.usable: dict[Any, list[float]] = {}  # areas by image
        self.kinds: Counter = Counter()
        self.classes = set(use.classes)
        self._ids: set = set()

    def add(self, annotation: Any) -> None:
        """Count one annotation."""
        problem = self._form_problem(annotation)
        if problem:
            where = annotation.get("id") if isinstance(annotation, dict) else annotation
            self.errors.add(problem, where)
            return
        number, image = annotation["id"], self.images.get(annotation["image_id"])
        if number in self._ids:
            self.errors.add("annotations have the id of another one", number)
        self._ids.add(number)
        dropped = self._dropped(annotation, image)
        if dropped:
            self.warnings.add(f"annotations are left out: {dropped}", number)
            return
        crowd = bool(annotation.get("iscrowd"))
        segmentation = annotation.get("segmentation")
        self.kinds["crowd regions"] += crowd
        self.kinds["masks as run lengths"] += isinstance(segmentation, dict)
        effect = KEPT
        if self.use.needs_masks or segmentation:
            problem, effect = mask_problem(segmentation, image["height"], image["width"])
            if problem:
                (self.errors if effect == STOPS and self.use.needs_masks else self.warnings).add(problem, number)
        if not crowd and (effect == KEPT or not self.use.needs_masks):
            self.usable.setdefault(annotation["image_id"], []).append(annotation["area"])

    def _form_problem(self, annotation: Any) -> str:
        if not isinstance(annotation, dict):
            return "annotations are no dicts"
        for key in ("id", "image_id", "category_id"):
            if not _is_id(annotation.get(key)):
                return f"annotations have no {key}"
        if not are_numbers(annotation.get("bbox")) or len(annotation["bbox"]) != 4:
            return "annotations have no bbox of four finite numbers [x, y, width, height]"
        if not are_numbers([annotation.get("area")]):
            return "annotations have no area, a finite number of square pixels, which mmdet reads"
        return ""

    def _dropped(self, annotation: dict, image: dict | None) -> str:
        """Say why mmdet leaves an annotation out, in the order in which it asks."""
        if self.categories.get(annotation["category_id"]) in self.classes:
            self.annotated.add(annotation["image_id"])
        if image is None:
            return "their image_id is of no image"
        if annotation.get("ignore"):
            return "they are marked `ignore`"
        x, y, width, height = annotation["bbox"]
        inside = min(x + width, image["width"]) > max(x, 0) and min(y + height, image["height"]) > max(y, 0)
        if width < 1 or height < 1:
            return "their box is less than a pixel wide or high"
        if not inside:
            return "their box is outside the image"
        if annotation["area"] <= 0:
            return "their area is not positive"
        if annotation["category_id"] not in self.categories:
            return "their category_id is of no category"
        if self.categories[annotation["category_id"]] not in self.classes:
            return "their category is not among the classes"
        if x < -1 or y < -1 or x + width > image["width"] + 1 or y + height > image["height"] + 1:
            self.warnings.add("boxes reach out of their image by more than a pixel", annotation["id"])
        return ""


def _used_images(images: dict, annotated: set, use: CocoUse) -> list:
    used = list(images)
    if use.training:
        used = [
            number
            for number, image in images.items()
            if min(image["height"], image["width"]) >= use.min_size and (not use.filter_empty or number in annotated)
        ]
    if isinstance(use.indices, int):
        return used[: use.indices] if use.indices >= 0 else used[use.indices :]
    if use.indices is not None:
        return [used[index] for index in use.indices if -len(used) <= index < len(used)]
    return used


def _summarize(report: SplitReport, lists: dict, images: dict, objects: _Objects, used: list, use: CocoUse) -> None:
    small = sum(min(image["height"], image["width"]) < use.min_size for image in images.values())
    areas = [area for number in used for area in objects.usable.get(number, [])]
    report.counts |= {
        "classes": str(len(use.classes)),
        "images in the file": f"{len(lists['images']):,}",
        "images used": f"{len(used):,}",
        "annotations in the file": f"{len(lists['annotations']):,}",
        "objects used": f"{len(areas):,}",
        **{kind: f"{objects.kinds[kind]:,}" for kind in ("crowd regions", "masks as run lengths")},
    }
    for name, (low, high) in _RANGES.items():
        count = sum(low <= area < high for area in areas)
        report.counts[name] = f"{count:,}" if count else "n/a"
    reasons = []
    if use.training and use.filter_empty:
        reasons.append(f"{len(images.keys() - objects.annotated):,} have no annotation of a class (filter_empty_gt)")
    if use.training and use.min_size:
        reasons.append(f"{small:,} are smaller than min_size={use.min_size:g}")
    if use.indices is not None:
        reasons.append(f"indices={use.indices!r}")
    why = f": {'; '.join(reasons)}" if reasons else ""
    if not used:
        report.errors.append(f"0 of {len(lists['images']):,} images are left{why}.")
    elif not areas:
        text = f"0 of {len(used):,} images have an object that can be used{why}; of {len(lists['annotations']):,} "
        text += "annotations none is left, for the reasons given above." if lists["annotations"] else "annotations."
        (report.errors if use.training else report.warnings).append(text)
    elif len(used) < len(images):
        report.warnings.append(f"{len(used):,} of {len(images):,} images are left{why}.")


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def are_numbers(values: Any) -> bool:
    """Return whether ``values`` is a list of finite numbers of a sensible size."""
    # JSON may hold NaN and integers too large for a float; the comparisons come before the sum for the sake of both.
    return (
        isinstance(values, list)
        and set(map(type, values)) <= _NUMBERS
        and (not values or (min(values) > -LIMIT and max(values) < LIMIT and sum(values) == sum(values)))
    )


def mask_problem(segmentation: Any, height: int, width: int) -> tuple[str, str]:
    """Say what is wrong with polygons or run lengths of an image of that size, and what mmdet does about it.

    Returns:
        The problem, or ``""``; and :data:`STOPS`, :data:`DROPPED` or :data:`KEPT`.
    """
    if not segmentation:
        return "objects have no segmentation, which the pipeline's LoadAnnotations(with_mask=True) needs", STOPS
    if isinstance(segmentation, list):
        return _polygons_problem(segmentation)
    if not isinstance(segmentation, Mapping):
        return "segmentations are neither a list of polygons nor a dict of run lengths", STOPS
    return _run_lengths_problem(segmentation, height, width)


def _polygons_problem(polygons: list) -> tuple[str, str]:
    short = flat = 0
    for polygon in polygons:
        if not are_numbers(polygon):
            return "segmentations are no list of polygons [x1, y1, x2, y2, ...] of finite numbers", STOPS
        if len(polygon) < 6 or len(polygon) % 2:
            short += 1
        else:
            flat += not _has_area(polygon)
    if short == len(polygons):
        return "objects have only polygons of fewer than three corners or an odd count of numbers, so no mask", DROPPED
    if short:
        return "objects have polygons of fewer than three corners or an odd count of numbers beside others", KEPT
    return "objects have polygons without area" if flat else "", KEPT


def _has_area(polygon: list) -> bool:
    xs, ys = polygon[::2], polygon[1::2]
    if min(xs) == max(xs) or min(ys) == max(ys):
        return False
    # Longer polygons on one slanted line do not occur; summing all of COCO's would take most of the time.
    return len(xs) > 4 or sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs))) != 0


def _run_lengths_problem(mask: Mapping, height: int, width: int) -> tuple[str, str]:
    counts = mask.get("counts")
    if mask.get("size") != [height, width]:
        return "masks as run lengths have another size than [height, width] of their image", STOPS
    lengths = _decompressed(counts) if isinstance(counts, str) else counts
    whole = isinstance(lengths, list) and lengths and set(map(type, lengths)) <= {int} and min(lengths) >= 0
    if not whole or sum(lengths) != height * width:
        return "masks as run lengths do not add up to height * width of their image", STOPS
    return "", KEPT


def _decompressed(counts: str) -> list[int] | None:
    """Return the run lengths of COCO's compressed form, or None if it is none.

    Six bits a character: five of the number, lowest first, and whether more follow. From the fourth number on it is the
    difference to the last but one.
    """
    lengths: list[int] = []
    value = shift = 0
    for character in counts:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
        value = shift = 0
    return None if shift else lengths

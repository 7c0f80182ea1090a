"""COCO annotation files and the masks in them: what is wrong, and what of it a detector gets to see."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmspectral.datasets.check.report import SplitReport, Tally, check_files, check_sizes
from mmspectral.errors import UsageError

LIMIT = 1e9  # no image has as many pixels in a row; float32 boxes cannot resolve it either
_LARGEST_ID = 2**53  # COCO's evaluator keeps ids as float64
_LARGEST_IMAGE = 2**30  # pixels; OpenCV reads no larger one
_NARROWEST = 200  # an image of this ratio of sides is less than a pixel wide once its long side has 100
_NUMBERS = {int, float}
_FLAGS = {int, bool}
# What training does about the problem of a mask: raise, leave the object out, leave a polygon out, or keep it.
# COCO's evaluator can use none but the last.
STOPS, DROPPED, CUT, KEPT = "stops", "dropped", "cut", "kept"
# COCO's area ranges in square pixels, by the end of the names of their metrics.
_RANGES = {"small (AP_s)": (0, 32**2), "medium (AP_m)": (32**2, 96**2), "large (AP_l)": (96**2, LIMIT**2)}


@dataclass(frozen=True)
class CocoUse:
    """How a dataset uses its annotation file."""

    classes: tuple[str, ...]
    own_classes: bool = False  # the names are those of the dataset's type, as ``metainfo`` gives none
    training: bool = True  # annotations are filtered and needed
    needs_masks: bool = False  # the pipeline loads masks
    evaluated: frozenset[str] = frozenset()  # what COCO's evaluator scores: bbox, segm
    by_mmdet: bool = False  # that evaluator is mmdet's, which reads fields as they are
    loader: Mapping = field(default_factory=dict)  # settings of the transform that reads the images
    filter_empty: bool = False  # images without annotations are left out
    min_size: float = 0  # shortest side of an image that is used, in pixels
    indices: int | Sequence[int] | None = None


def read_annotations(path: str | Path) -> dict:
    """Return the contents of a COCO annotation file.

    Raises:
        UsageError: There is no such file, or its parts are no lists.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The annotation file {path} cannot be read: {error}") from error
    parts = ("images", "categories", "annotations")
    lists = dict(annotations=[]) | content if isinstance(content, dict) else {}
    wrong = [part for part in parts if not isinstance(lists.get(part), list)]
    if wrong:
        raise UsageError(f"{path} is no COCO annotation file: it has no list of {' and no list of '.join(wrong)}.")
    return content


def entries_with(content: dict, part: str, name: str) -> list[dict]:
    """Return a list of an annotation file whose entries must have an id and, as a string, ``name``.

    Raises:
        UsageError: One has not.
    """
    for entry in content[part]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get(name), str):
            raise UsageError(f"In the annotation file, {part} must have an id and a {name}, unlike {entry!r:.80}.")
    return content[part]


def is_narrow(height: int, width: int) -> bool:
    """Return whether an image is so much longer than wide, or wider than long, that it vanishes when it is resized."""
    return max(height, width) > _NARROWEST * min(height, width)


def check_coco(report: SplitReport, ann_file: str, folder: str | None, use: CocoUse) -> list[dict]:
    """Check an annotation file and, in ``folder`` if it is not None, its images; fill ``report``.

    Returns:
        The entries of the images that are used.
    """
    try:
        content = read_annotations(ann_file)
    except UsageError as error:
        report.errors.append(str(error))
        report.wrong_classes = use.own_classes
        return []
    used = check_content(report, content, use)
    if folder is not None:
        check_files(report, folder, (image["file_name"] for image in used))
        check_sizes(report, folder, used, use.loader)
    return used


def check_content(report: SplitReport, content: dict, use: CocoUse) -> list[dict]:
    """Check the contents of an annotation file, fill ``report`` and return the images that are used."""
    lists = {name: content.get(name, []) for name in ("images", "annotations", "categories")}
    errors, warnings = Tally(), Tally()
    categories = _categories(lists["categories"], report, errors, use)
    images = _images(lists["images"], errors, warnings, use)
    objects = _Objects(use, categories, images, errors, warnings)
    for annotation in lists["annotations"]:
        objects.add(annotation)
    used = _used_images(images, objects.annotated, use)
    report.errors += errors.sentences()
    report.warnings += warnings.sentences()
    _summarize(report, lists, images, objects, used, use)
    return [images[number] for number in used]


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
        report.wrong_classes = True
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


def _images(entries: list, errors: Tally, warnings: Tally, use: CocoUse) -> dict[Any, dict]:
    images: dict[Any, dict] = {}
    names = set()
    for entry in entries:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            errors.add("images have no id that is a whole number", entry)
            continue
        if not isinstance(entry.get("file_name"), str) or not entry["file_name"]:
            errors.add("images have no file_name", entry["id"])
            continue
        sides = entry.get("height"), entry.get("width")
        if not all(type(side) is int and side > 0 for side in sides) or sides[0] * sides[1] > _LARGEST_IMAGE:
            problem = f"images have no height and width as whole numbers (up to {_LARGEST_IMAGE:,} pixels)"
            errors.add(problem, entry["id"])
            continue
        if is_narrow(*sides):
            problem = f"images have one side more than {_NARROWEST} times as long as the other, and vanish when resized"
            (warnings if use.loader.get("skip_unreadable") else errors).add(problem, entry["id"])
        if entry["id"] in images:
            errors.add("images have the id of another one", entry["id"])
        if entry["file_name"] in names:
            warnings.add("images have the file_name of another one", entry["file_name"])
        if os.path.isabs(entry["file_name"]) or os.path.normpath(entry["file_name"]).startswith(os.pardir):
            warnings.add("images have a file_name that leaves the folder of the images", entry["file_name"])
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
        if self.use.by_mmdet and number < 1:
            self.errors.add("annotations have an id below 1, which mmdet.CocoMetric counts as not found", number)
        if self.use.by_mmdet and "iscrowd" not in annotation:
            self.errors.add("annotations have no iscrowd, which mmdet.CocoMetric reads", number)
        known = image is not None and self.categories.get(annotation["category_id"]) in self.classes
        evaluated = self.use.evaluated if known else frozenset()
        segmentation, problem, effect = annotation.get("segmentation"), "", KEPT
        if image is not None and ("segm" in evaluated or self.use.needs_masks or segmentation):
            problem, effect = mask_problem(segmentation, image["height"], image["width"])
        dropped = self._dropped(annotation, image)
        if effect != KEPT and "segm" in evaluated:
            self.errors.add(f"{problem}, and the evaluator scores masks", number)
        elif problem and not dropped:
            (self.errors if effect == STOPS and self.use.needs_masks else self.warnings).add(problem, number)
        if dropped:
            what = "count in the evaluation, but would be left out in training" if evaluated else "are left out"
            self.warnings.add(f"annotations {what}: {dropped}", number)
            return
        crowd = bool(annotation.get("iscrowd"))
        self.kinds["crowd regions"] += crowd
        self.kinds["masks as run lengths"] += isinstance(segmentation, dict)
        if not crowd and (effect in (KEPT, CUT) or not self.use.needs_masks):
            self.usable.setdefault(annotation["image_id"], []).append(annotation["area"])

    def _form_problem(self, annotation: Any) -> str:
        if not isinstance(annotation, dict):
            return "annotations are no dicts"
        for key in ("id", "image_id", "category_id"):
            if not _is_id(annotation.get(key)):
                return f"annotations have no {key} that is a whole number"
        if not are_numbers(annotation.get("bbox")) or len(annotation["bbox"]) != 4:
            return "annotations have no bbox of four finite numbers [x, y, width, height]"
        if not are_numbers([annotation.get("area")]):
            return "annotations have no area, a finite number of square pixels, which mmdet reads"
        for key in ("iscrowd", "ignore"):
            if type(value := annotation.get(key, 0)) not in _FLAGS or value not in (0, 1):
                return f"annotations have another {key} than 0 or 1"
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
    return type(value) is int and abs(value) <= _LARGEST_ID


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
        The problem, or ``""``; and :data:`STOPS`, :data:`DROPPED`, :data:`CUT` or :data:`KEPT`.
    """
    if not segmentation:
        return "objects have no segmentation", STOPS
    if isinstance(segmentation, list):
        return _polygons_problem(segmentation, 10 * max(height, width))
    if not isinstance(segmentation, Mapping):
        return "segmentations are neither a list of polygons nor a dict of run lengths", STOPS
    return _run_lengths_problem(segmentation, height, width)


def _polygons_problem(polygons: list, reach: int) -> tuple[str, str]:
    short = flat = 0
    for polygon in polygons:
        if not are_numbers(polygon):
            return "segmentations are no list of polygons [x1, y1, x2, y2, ...] of finite numbers", STOPS
        if len(polygon) < 6 or len(polygon) % 2:
            short += 1
        elif min(polygon) < -reach or max(polygon) > reach:
            return "polygons reach further than ten times the size of their image", STOPS
        else:
            flat += not _has_area(polygon)
    if short == len(polygons):
        return "objects have only polygons of fewer than three corners or an odd count of numbers, so no mask", DROPPED
    if short:
        return "objects have polygons of fewer than three corners or an odd count of numbers beside others", CUT
    return "objects have polygons without area" if flat else "", KEPT


def _has_area(polygon: list) -> bool:
    xs, ys = polygon[::2], polygon[1::2]
    if min(xs) == max(xs) or min(ys) == max(ys):
        return False
    # Longer polygons on one slanted line do not occur; summing all of COCO's would take most of the time.
    return len(xs) > 4 or sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs))) != 0


def _run_lengths_problem(mask: Mapping, height: int, width: int) -> tuple[str, str]:
    counts = mask.get("counts")
    size = mask.get("size")
    if size != [height, width] or set(map(type, size)) != {int}:
        return "masks as run lengths have another size than [height, width] of their image, in whole numbers", STOPS
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

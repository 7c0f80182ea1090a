"""What is wrong with one mask of an annotation file."""

from collections.abc import Mapping
from typing import Any

LIMIT = 1e9  # no image has as many pixels in a row; float32 boxes cannot resolve it either
_NUMBERS = {int, float}
# What mmdet does about a problem: raise, leave the object out, or train with it all the same.
STOPS, DROPPED, KEPT = "stops", "dropped", "kept"


def are_numbers(values: Any) -> bool:
    """Return whether ``values`` is a list of finite numbers of a sensible size."""
    # JSON may hold NaN and integers too large for a float; the comparisons come before the sum for the sake of both.
    return (
        isinstance(values, list)
        and set(map(type, values)) <= _NUMBERS
        and (not values or (min(values) > -LIMIT and max(values) < LIMIT and sum(values) == sum(values)))
    )


def mask_problem(segmentation: Any, height: int, width: int) -> tuple[str, str]:
    """Say what is wrong with a mask.

    Args:
        segmentation: A list of polygons or a dict of run lengths.
        height: Of the image in pixels.
        width: Of the image in pixels.

    Returns:
        The problem, or ``""``; and what mmdet does about it: :data:`STOPS`,
        :data:`DROPPED` or :data:`KEPT`.
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

    Six bits a character: five of the number, lowest first, and whether more
    follow. From the fourth number on it is the difference to the last but one.
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

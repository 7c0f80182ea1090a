"""Draws the images and the annotations of the shapes set, bit for bit the same everywhere.

Random numbers come from ``Generator.random`` of a PCG64 only, whose stream numpy does not change, and pixels from
integer arithmetic. Every image has its own stream, so the first n images of a longer set are those of a shorter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import cv2
import numpy as np

CLASSES = ("circle", "square", "triangle", "star")

# Target areas at 160 pixels, inside COCO's small (below 32 squared), medium and large (above 96 squared).
_AREAS = {"small": (450.0, 950.0), "medium": (1300.0, 6000.0), "large": (10500.0, 14500.0)}
_REFERENCE_SIZE = 160
_SUBPIXELS = 16
_MAX_SHAPES = 6
_TRIES = 40
# A later shape may hide at most this part of an earlier one.
_MAX_HIDDEN = 0.3
# Visible pieces below this number of pixels are slivers of rasterisation: left out of the annotation.
_MIN_PIECE = 16
# Two bright RGB colours for each class, in their order; the backgrounds stay darker and duller. Colour gives the class
# away, so that a detector learns to tell classes within minutes; boxes and masks still have to be found.
_COLOURS = (
    ((235, 60, 60), (250, 150, 50)),
    ((70, 205, 80), (70, 220, 225)),
    ((80, 120, 245), (225, 90, 225)),
    ((240, 220, 60), (240, 240, 240)),
)
_BRIGHTNESS = (100, 75)  # percent


class _Palette:
    """Colours of one image: neighbours of the same class, or without a cue all, differ until all variants are used."""

    def __init__(self, rng: np.random.Generator, cue: bool) -> None:
        self._variants = []
        for colours in _COLOURS if cue else (sum(_COLOURS, ()),):
            variants = [np.array(colour) * percent // 100 for colour in colours for percent in _BRIGHTNESS]
            order = np.argsort(rng.random(len(variants)), kind="stable")
            self._variants.append(cycle([variants[i] for i in order]))

    def of(self, label: int) -> np.ndarray:
        """Return the next colour of a class."""
        return next(self._variants[label % len(self._variants)])


@dataclass
class _Instance:
    label: int
    full_area: int
    visible: np.ndarray  # [size, size] bool
    polygons: list[np.ndarray]  # each [n, 2]; empty for the crowd


def _polygon(corners: int, inner_radius: float | None = None) -> np.ndarray:
    """Return the corners of a polygon of area 1 about the origin; a star if ``inner_radius`` is given."""
    count = corners if inner_radius is None else 2 * corners
    angles = 2 * np.pi * np.arange(count) / count
    radii = np.ones(count)
    if inner_radius is not None:
        radii[1::2] = inner_radius
    area = 0.5 * np.sin(2 * np.pi / count) * np.sum(radii * np.roll(radii, 1))
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1) / np.sqrt(area)


# In the order of CLASSES; a disc needs no corners.
_OUTLINES = (None, _polygon(4), _polygon(3), _polygon(5, inner_radius=0.45))


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * rng.random()


def _below(rng: np.random.Generator, stop: int) -> int:
    return int(rng.random() * stop)


def _noise(rng: np.random.Generator, shape: tuple[int, ...], amplitude: int) -> np.ndarray:
    """Return integers from -amplitude to amplitude."""
    return np.floor(rng.random(shape) * (2 * amplitude + 1)).astype(np.int32) - amplitude


def _background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return a dull texture of stripes, checks or clouds, int32 of shape [size, size, 3]."""
    base = np.array([int(_between(rng, 45, 110)) for _ in range(3)], dtype=np.int32)
    contrast = int(_between(rng, 12, 30))
    y, x = np.mgrid[:size, :size]
    kind = _below(rng, 3)
    if kind == 0:
        slope_x, slope_y, period = _below(rng, 5) - 2, 1 + _below(rng, 3), 8 + _below(rng, 17)
        pattern = (slope_x * x + slope_y * y) // period % 2 * contrast
    elif kind == 1:
        period = 6 + _below(rng, 15)
        pattern = (x // period + y // period) % 2 * contrast
    else:
        # Clouds: a coarse grid of heights, interpolated in integers.
        cell = 16
        grid = _noise(rng, (size // cell + 2, size // cell + 2), 2 * contrast)
        row, down = np.divmod(y, cell)
        column, right = np.divmod(x, cell)
        top = grid[row, column] * (cell - right) + grid[row, column + 1] * right
        bottom = grid[row + 1, column] * (cell - right) + grid[row + 1, column + 1] * right
        pattern = (top * (cell - down) + bottom * down) // (cell * cell)
    return base + pattern[..., None].astype(np.int32)


def _pixel_centres(
    lowest: np.ndarray, highest: np.ndarray, size: int
) -> tuple[tuple[slice, slice], np.ndarray, np.ndarray]:
    """Return the window of the image between two corners, with x [1, w] and y [h, 1] of its pixel centres."""
    (left, top), (right, bottom) = np.clip(lowest // _SUBPIXELS, 0, size), np.clip(highest // _SUBPIXELS + 1, 0, size)
    x, y = (np.arange(*ends) * _SUBPIXELS + _SUBPIXELS // 2 for ends in ((left, right), (top, bottom)))
    return (slice(top, bottom), slice(left, right)), x[None, :], y[:, None]


def _shape_mask(label: int, area: float, centre: tuple[float, float], turn: float, size: int) -> np.ndarray:
    """Return the pixels whose centres are inside a shape, bool of shape [size, size].

    Own integer arithmetic on a grid of 1/16 pixel, as cv2.fillPoly fills different pixels in different versions of
    OpenCV.
    """
    middle = np.rint(np.array(centre) * _SUBPIXELS).astype(np.int64)
    mask = np.zeros((size, size), dtype=bool)
    outline = _OUTLINES[label]
    if outline is None:
        radius = np.sqrt(area / np.pi) * _SUBPIXELS
        window, x, y = _pixel_centres(middle - int(radius) - 1, middle + int(radius) + 1, size)
        mask[window] = (x - middle[0]) ** 2 + (y - middle[1]) ** 2 <= int(radius**2)
        return mask
    cos, sin = np.cos(turn), np.sin(turn)
    turned = np.stack([outline[:, 0] * cos - outline[:, 1] * sin, outline[:, 0] * sin + outline[:, 1] * cos], axis=1)
    corners = np.rint(turned * np.sqrt(area) * _SUBPIXELS).astype(np.int64) + middle
    window, x, y = _pixel_centres(corners.min(axis=0), corners.max(axis=0), size)
    # Even-odd rule: count the edges that a ray to the right of the pixel crosses.
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        spans = (y0 <= y) != (y1 <= y)
        right_of_pixel = ((x1 - x0) * (y - y0) - (x - x0) * (y1 - y0) > 0) == (y1 > y0)
        mask[window] ^= spans & right_of_pixel
    return mask


def _outline(piece: np.ndarray) -> np.ndarray | None:
    """Return the corners of the pixel edges around a connected mask, or None if it has a hole.

    On the mask drawn at double size, a contour through pixel centres visits both pixels of each edge; ``(v + 1) // 2``
    sends those to the edge itself, so that the polygon encloses exactly the pixels of the mask.
    """
    x, y, width, height = cv2.boundingRect(piece.astype(np.uint8))
    doubled = piece[y : y + height, x : x + width].astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, _ = cv2.findContours(doubled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    points = (contours[0][:, 0] + 1) // 2 + np.array([x, y], dtype=np.int32)
    points = points[np.any(points != np.roll(points, 1, axis=0), axis=1)]
    return points if cv2.contourArea(points) == piece.sum() else None


def _trace(visible: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]] | None:
    """Split a visible region into outlined pieces; None if a piece has a hole, which polygons cannot hold."""
    count, pieces = cv2.connectedComponents(visible.astype(np.uint8), connectivity=4)
    kept = np.zeros_like(visible)
    polygons = []
    for index in range(1, count):
        piece = pieces == index
        if piece.sum() < _MIN_PIECE:
            continue
        polygon = _outline(piece)
        if polygon is None:
            return None
        kept |= piece
        polygons.append(polygon)
    return kept, polygons


def _hidden_behind(instance: _Instance, mask: np.ndarray) -> _Instance | None:
    """Return the instance with ``mask`` in front of it, or None if that hides too much or makes a hole."""
    if not np.any(instance.visible & mask):
        return instance
    visible = instance.visible & ~mask
    polygons: list[np.ndarray] = []
    enough = (1 - _MAX_HIDDEN) * instance.full_area
    if visible.sum() < enough:
        return None
    if instance.polygons:
        traced = _trace(visible)
        if traced is None or traced[0].sum() < enough:
            return None
        visible, polygons = traced
    return _Instance(instance.label, instance.full_area, visible, polygons)


def _paint(rng: np.random.Generator, image: np.ndarray, mask: np.ndarray, colour: Sequence[int]) -> None:
    shift = _noise(rng, (3,), 10)
    image[mask] = np.asarray(colour, dtype=np.int32) + shift


def _crowd(rng: np.random.Generator, image: np.ndarray, palette: _Palette) -> _Instance:
    """Paint a cluster of tiny shapes of one class and return it as one instance."""
    size = image.shape[0]
    scale = size / _REFERENCE_SIZE
    label = _below(rng, len(CLASSES))
    colour = palette.of(label)
    middle_x, middle_y = _between(rng, 0.25, 0.75) * size, _between(rng, 0.25, 0.75) * size
    spread = 28 * scale
    visible = np.zeros((size, size), dtype=bool)
    for _ in range(30):
        centre = (middle_x + _between(rng, -spread, spread), middle_y + _between(rng, -spread, spread))
        mask = _shape_mask(label, _between(rng, 25, 55) * scale**2, centre, _between(rng, 0, 2 * np.pi), size)
        _paint(rng, image, mask, colour)
        visible |= mask
    return _Instance(label, int(visible.sum()), visible, [])


def _add_shape(
    rng: np.random.Generator, image: np.ndarray, instances: list[_Instance], range_name: str, palette: _Palette
) -> None:
    """Paint one more shape in front, if a place for it is found, and update what it hides."""
    size = image.shape[0]
    label = _below(rng, len(CLASSES))
    area = _between(rng, *_AREAS[range_name]) * (size / _REFERENCE_SIZE) ** 2
    margin = 0.42 if range_name == "large" else 0.08
    for _ in range(_TRIES):
        centre = (_between(rng, margin, 1 - margin) * size, _between(rng, margin, 1 - margin) * size)
        mask = _shape_mask(label, area, centre, _between(rng, 0, 2 * np.pi), size)
        full_area = int(mask.sum())
        # The image border may cut off some of it, but not so much that the class is unclear.
        if full_area < 0.75 * area:
            continue
        behind = [_hidden_behind(instance, mask) for instance in instances]
        if any(instance is None for instance in behind):
            continue
        traced = _trace(mask)
        if traced is None:
            continue
        instances[:] = [*behind, _Instance(label, full_area, *traced)]
        _paint(rng, image, mask, palette.of(label))
        return


def _run_lengths(mask: np.ndarray) -> list[int]:
    """Return COCO's uncompressed run lengths: column by column, background first."""
    flat = np.concatenate([[False], mask.ravel(order="F")])
    edges = np.flatnonzero(flat[1:] != flat[:-1])
    return np.diff(np.concatenate([[0], edges, [mask.size]])).tolist()


def _canonical(polygons: list[np.ndarray]) -> list[list[float]]:
    """Drop corners on straight lines and order corners and pieces, all of which OpenCV leaves open."""
    ordered = []
    for polygon in polygons:
        before, after = polygon - np.roll(polygon, 1, axis=0), np.roll(polygon, -1, axis=0) - polygon
        corners = polygon[before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]]
        first = np.lexsort(corners.T)[0]
        # Floats, as mmdet scales polygons in place and would cut integers.
        ordered.append(np.roll(corners, -first, axis=0).astype(float).ravel().tolist())
    return sorted(ordered)


def _annotation(instance: _Instance) -> dict[str, Any]:
    rows, columns = np.flatnonzero(instance.visible.any(axis=1)), np.flatnonzero(instance.visible.any(axis=0))
    x, y = int(columns[0]), int(rows[0])
    if instance.polygons:
        segmentation: Any = _canonical(instance.polygons)
    else:
        segmentation = {"counts": _run_lengths(instance.visible), "size": list(instance.visible.shape)}
    return {
        "category_id": instance.label + 1,
        "segmentation": segmentation,
        "bbox": [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y],
        "area": int(instance.visible.sum()),
        "iscrowd": 0 if instance.polygons else 1,
    }


def render(
    seed: int, split_index: int, index: int, size: int, colour_cue: bool = True
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Draw one image.

    Of 25 images in a row one is empty; of 10 one has a crowd region; of 2 one starts with a shape that covers much of
    it. Shapes hide parts of earlier ones; boxes, areas and polygons are those of the visible pixels.

    Args:
        seed: Seed of the set.
        split_index: Number of the split, so that splits differ.
        index: Number of the image in its split, from 0.
        size: Side of the square image in pixels.
        colour_cue: Whether each class has colours of its own.

    Returns:
        The image, uint8 RGB of shape [size, size, 3], and its annotations in COCO's form without ``id`` and
        ``image_id``.
    """
    rng = np.random.Generator(np.random.PCG64([seed, split_index, index]))
    image = _background(rng, size)
    instances: list[_Instance] = []
    if index % 25 != 24:
        palette = _Palette(rng, colour_cue)
        if index % 10 == 7:
            instances.append(_crowd(rng, image, palette))
        elif index % 2 == 0:
            _add_shape(rng, image, instances, "large", palette)
        for _ in range(2 + _below(rng, _MAX_SHAPES - 2)):
            _add_shape(rng, image, instances, "small" if rng.random() < 0.45 else "medium", palette)
    image = np.clip(image + _noise(rng, (size, size, 1), 12), 0, 255).astype(np.uint8)
    return image, [_annotation(instance) for instance in instances]

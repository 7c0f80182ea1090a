"""Colours of the shapes set."""

from itertools import cycle

import numpy as np

# Two bright RGB colours for each class, in their order; the backgrounds stay darker and duller. Colour gives the class
# away, so that a detector learns to tell classes within minutes; boxes and masks still have to be found.
_COLOURS = (
    ((235, 60, 60), (250, 150, 50)),
    ((70, 205, 80), (70, 220, 225)),
    ((80, 120, 245), (225, 90, 225)),
    ((240, 220, 60), (240, 240, 240)),
)
_BRIGHTNESS = (100, 75)  # percent


class Palette:
    """Colours of one image: neighbours of the same class differ until all variants are used."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._variants = []
        for colours in _COLOURS:
            variants = [np.array(colour) * percent // 100 for colour in colours for percent in _BRIGHTNESS]
            order = np.argsort(rng.random(len(variants)), kind="stable")
            self._variants.append(cycle([variants[i] for i in order]))

    def of(self, label: int) -> np.ndarray:
        """Return the next colour of a class."""
        return next(self._variants[label])

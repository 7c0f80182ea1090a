"""Reports of a data check and how they are printed, and the search for image files."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image
from terminaltables import AsciiTable

_EXAMPLES = 3
_COMPARED = 1000
_ORIENTATION = 0x0112  # the tag of EXIF
_UPENDED = (5, 6, 7, 8)  # its values that exchange height and width


class Tally:
    """Counts how often each problem occurs, and remembers where it did first."""

    def __init__(self) -> None:
        self._found: dict[str, list] = {}

    def add(self, problem: str, where: object) -> None:
        """Count ``problem`` once more; ``where`` is named in the sentence if it is among the first."""
        entry = self._found.setdefault(problem, [0])
        entry[0] += 1
        if len(entry) <= _EXAMPLES:
            entry.append(where)

    def sentences(self) -> list[str]:
        """Return one sentence for each problem."""
        return [
            f"{number:,} {problem} (such as {', '.join(map(_shown, where))})."
            for problem, (number, *where) in self._found.items()
        ]


def _shown(where: object) -> str:
    text = repr(where)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass
class SplitReport:
    """One dataset of a config."""

    name: str  # train, val or test, numbered where there are several
    source: str = ""  # annotation file or folder
    classes: tuple[str, ...] | None = None  # None where the dataset does not say
    counts: dict[str, str] = field(default_factory=dict)  # rows of the table
    errors: list[str] = field(default_factory=list)  # what training cannot or should not start with
    warnings: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)  # path of each image that is used
    wrong_classes: bool = False  # classes are not those of the file
    open_vocabulary: bool = False  # classes are texts, for which heads have no outputs


@dataclass
class DatasetReport:
    """All datasets of a config; errors and warnings of its own concern several of them, or the model."""

    splits: list[SplitReport]
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def all_errors(self) -> list[str]:
        """Every error, with the name of its dataset in front."""
        return [f"{split.name}: {text}" for split in self.splits for text in split.errors] + self.errors

    @property
    def all_warnings(self) -> list[str]:
        """Every warning, with the name of its dataset in front."""
        return [f"{split.name}: {text}" for split in self.splits for text in split.warnings] + self.warnings

    def __str__(self) -> str:
        return self.text(with_errors=True)

    def text(self, with_errors: bool) -> str:
        """Return the table, the sources, the warnings and, if asked for, the errors."""
        rows = list(dict.fromkeys(row for split in self.splits for row in split.counts))
        table = [["", *(split.name for split in self.splits)]]
        table += [[row, *(split.counts.get(row, "-") for split in self.splits)] for row in rows]
        lines = [AsciiTable(table).table] if self.splits else ["The config has no datasets."]
        lines += [f"{split.name}: {split.source}" for split in self.splits if split.source]
        if any("n/a" in value for split in self.splits for value in split.counts.values()):
            lines.append(
                "n/a: without objects of that size, COCO's AP and AR for it are -1, which means not available."
            )
        for kind, found in (("warning", self.all_warnings), ("error", self.all_errors if with_errors else [])):
            lines += [f"{kind}: {text}" for text in found]
        return "\n".join(lines)


def check_files(report: SplitReport, folder: str, names: Iterable[str]) -> None:
    """Look for images by paths relative to ``folder``; paths go into ``report.files``, missing ones into its errors.

    Folders are listed, as asking for files one by one is slow over a network.
    """
    by_folder = defaultdict(list)
    for name in names:
        path = os.path.normpath(os.path.join(folder, name))
        by_folder[os.path.dirname(path)].append(path)
    missing, absent = Tally(), []
    for parent, paths in by_folder.items():
        report.files.update(map(os.path.abspath, paths))
        try:
            present = set(os.listdir(parent or "."))
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            absent.append(f"The folder {parent!r} with {len(paths):,} of its images cannot be listed: {error}.")
            continue
        for path in paths:
            if os.path.basename(path) not in present:
                missing.add("images have no file", path)
    report.errors += missing.sentences() + absent[:3]
    if len(absent) > 3:
        report.errors.append(f"{len(absent) - 3:,} more folders cannot be listed.")


def check_sizes(report: SplitReport, folder: str, images: Sequence[Mapping], loader: Mapping) -> None:
    """Compare the sizes of images with those in their annotations, of a thousand where there are more.

    A camera notes how it was held (EXIF). Images are turned by it when they are read, and annotations are not.

    Args:
        report: Filled.
        folder: Of the images.
        images: Their entries in the annotation file.
        loader: Settings of the transform that reads them.
    """
    turns = loader.get("color_type", "color") in ("color", "grayscale")
    differ, turned, closed = Tally(), Tally(), Tally()
    step = max(1, len(images) / _COMPARED)
    sample = [images[int(index * step)] for index in range(min(len(images), _COMPARED))]
    for image in sample:
        try:
            height, width, orientation = _read_size(os.path.join(folder, image["file_name"]), turns)
        except FileNotFoundError:  # named already
            continue
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            closed.add("images cannot be opened", f"{image['file_name']}: {error}")
            continue
        stated = (image["height"], image["width"])
        if (height, width) != stated:
            cause = f", turned by its EXIF orientation {orientation}" if orientation != 1 else ""
            where = f"id {image['id']}: {width} x {height}{cause}, instead of {stated[1]} x {stated[0]}"
            differ.add("images are of another size (width x height) than in the annotation file", where)
        elif orientation != 1:
            turned.add(
                "images are mirrored or turned by their EXIF when they are read: look at their boxes", image["id"]
            )
    report.errors += differ.sentences()
    report.warnings += turned.sentences() + closed.sentences()
    report.counts["image sizes compared"] = f"{len(sample):,}"


def _read_size(path: str, turns: bool) -> tuple[int, int, int]:
    """Return height and width of an image as it is read, and its EXIF orientation, 1 if that does nothing."""
    with Image.open(path) as image:
        width, height = image.size
        # Not the method of PNG files, which decodes them.
        orientation = (Image.Image.getexif(image).get(_ORIENTATION) or 1) if turns else 1
    return (width, height, orientation) if orientation in _UPENDED else (height, width, orientation)


def check_overlap(first: SplitReport, second: SplitReport) -> list[str]:
    """Return a sentence if two datasets share images: the same path, or the same name and size in bytes."""
    same, alike = Tally(), Tally()
    for path in sorted(first.files & second.files):
        same.add(f"images are in {first.name} and in {second.name}", path)
    ours, theirs = _by_name(first.files - second.files), _by_name(second.files - first.files)
    for name in sorted(ours.keys() & theirs.keys())[:_COMPARED]:
        if (size := _size(ours[name])) is not None and size == _size(theirs[name]):
            alike.add(f"images of {first.name} and {second.name} have the same name and size", name)
    found = same.sentences() + alike.sentences()
    return [f"{text} Results on {second.name} then say little about new images." for text in found]


def _by_name(paths: Iterable[str]) -> Mapping[str, str]:
    return {os.path.basename(path): path for path in paths}


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return None

"""Which images are there, found by listing folders: asking for files one by one is slow over a network."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping

from mmspectral.datasets.check.report import SplitReport, Tally

_COMPARED = 1000


def check_files(report: SplitReport, folder: str, names: Iterable[str]) -> None:
    """Look for images in ``folder``; paths go into ``report.files``, missing ones into its errors.

    Args:
        report: Report of the dataset.
        folder: Folder that the names are relative to.
        names: Paths of images.
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

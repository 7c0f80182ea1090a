"""Classification sets: one folder for each class, or a text file with a path and a label in each line."""

import os
from collections import Counter
from collections.abc import Callable

from mmspectral.datasets.check.report import SplitReport, Tally, check_files


def check_folders(report: SplitReport, root: str, is_image: Callable[[str], bool]) -> None:
    """Check a set with one folder for each class; fill ``report``, with the folders as classes if it has none."""
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except (OSError, ValueError) as error:
        report.errors.append(f"The folder {root!r} cannot be listed: {error}.")
        return
    report.classes = report.classes or tuple(folders)
    images = Counter()
    for folder in folders:
        for parent, _, names in os.walk(os.path.join(root, folder), followlinks=True):
            paths = [os.path.abspath(os.path.join(parent, name)) for name in names if is_image(name)]
            images[folder] += len(paths)
            report.files.update(paths)
    if len(report.classes) != len(folders):
        report.errors.append(
            f"{root} has {len(folders):,} folders, but the dataset has {len(report.classes):,} classes. "
            "Folders become classes in alphabetical order, so there must be one for each."
        )
    empty = Tally()
    for folder in folders:
        if not images[folder]:
            empty.add("folders hold no image", folder)
    report.warnings += empty.sentences()
    _summarize(report, images.total())


def check_list(report: SplitReport, ann_file: str, root: str, labelled: bool) -> None:
    """Check a text file of paths relative to ``root``, each with a label if ``labelled``; fill ``report``."""
    try:
        with open(ann_file, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:
        report.errors.append(f"The annotation file {ann_file!r} cannot be read: {error}.")
        return
    wrong, twice = Tally(), Tally()
    labels = Counter()
    names: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        name, _, label = line.rpartition(" ") if labelled else (line, "", "0")
        if not name or not label.removeprefix("-").isdecimal() or not label.isascii():
            wrong.add("lines are not a path, a space and the number of a class", f"line {number}")
            continue
        if labelled and report.classes is not None and not 0 <= int(label) < len(report.classes):
            wrong.add(f"labels are not in 0..{len(report.classes) - 1}", f"line {number}: {label}")
        if name in names:
            twice.add("images are listed more than once", name)
        names[name] = None
        labels[label] += 1
    report.errors += wrong.sentences()
    report.warnings += twice.sentences()
    unused = len(report.classes or ()) - len(labels)
    if labelled and unused > 0:
        report.warnings.append(f"{unused:,} classes have no image.")
    check_files(report, root, names)
    _summarize(report, len(names))


def _summarize(report: SplitReport, images: int) -> None:
    report.counts |= {"classes": str(len(report.classes or ())), "images used": f"{images:,}"}
    if not images:
        report.errors.append(f"{report.source} has no image.")

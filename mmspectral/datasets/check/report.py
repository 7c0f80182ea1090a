"""What a check found, and how it is printed."""

from dataclasses import dataclass, field

from terminaltables import AsciiTable

_EXAMPLES = 3


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

    def count(self, problem: str) -> int:
        """Return how often ``problem`` was added."""
        return self._found[problem][0] if problem in self._found else 0

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
    """One dataset of a config.

    Args:
        name: ``"train"``, ``"val"`` or ``"test"``, numbered where there are several.
        source: Annotation file or folder.
        classes: Names of the classes; None where the dataset does not say.
        counts: Rows of the table.
        errors: What training cannot or should not start with.
        warnings: What it can start with, but should be looked at.
        files: Path of each image that is used.
        open_vocabulary: Whether classes are texts, for which heads have no outputs.
    """

    name: str
    source: str = ""
    classes: tuple[str, ...] | None = None
    counts: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    open_vocabulary: bool = False


@dataclass
class DatasetReport:
    """All datasets of a config, and how they fit each other and the heads.

    Args:
        splits: The datasets.
        errors: What concerns more than one of them, or the model.
        warnings: As ``errors``, but training can start.
    """

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
        rows = list(dict.fromkeys(row for split in self.splits for row in split.counts))
        table = [["", *(split.name for split in self.splits)]]
        table += [[row, *(split.counts.get(row, "-") for split in self.splits)] for row in rows]
        lines = [AsciiTable(table).table] if self.splits else ["The config has no datasets."]
        lines += [f"{split.name}: {split.source}" for split in self.splits if split.source]
        if any("n/a" in value for split in self.splits for value in split.counts.values()):
            lines.append(
                "n/a: without objects of that size, COCO's AP and AR for it are -1, which means not available."
            )
        for kind, found in (("warning", self.all_warnings), ("error", self.all_errors)):
            lines += [f"{kind}: {text}" for text in found]
        return "\n".join(lines)

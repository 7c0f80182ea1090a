"""Rows of measurements as Markdown and as a CSV file."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write_csv(rows: Sequence, path: str | Path) -> None:
    """Write dicts or dataclass instances of one type, one a line, with the names of their fields as header."""
    lines = [row if isinstance(row, Mapping) else asdict(row) for row in rows]
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)

"""Rows of measurements as a CSV file."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path


def write_csv(rows: Sequence, path: str | Path) -> None:
    """Write dataclass instances of one type, one a line, with the names of their fields as header."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))

"""Condition numbers over a training run, from what the ConditioningHook wrote into ``scalars.json``."""

import json
import re
from pathlib import Path

ROLES = "qkv"
_KAPPA = re.compile(r"(conditioning/.+/([qkv])/kappa_)(before|after)")

History = dict[str, list[tuple[int, float]]]


def kappa_history(work_dir: Path) -> History:
    """Return the largest condition number over the measured layers at each measured iteration.

    Reads all logs of the folder, so that a resumed run is one curve; where two
    logs have the same iteration, the newer one counts.

    Args:
        work_dir: Folder of a run of ``tools/train.py``.

    Returns:
        Iterations and values by series, such as ``"q, W + C"``; empty where no
        log has any. The hook leaves out rank-deficient projections, and so does
        this. Projections without a correction, whose two numbers are equal,
        count for ``W`` alone.
    """
    largest: dict[str, dict[int, float]] = {}
    for log in sorted(work_dir.glob("*/vis_data/scalars.json")):
        for record in _records(log):
            at_step: dict[str, float] = {}
            for name, value in record.items():
                found = _KAPPA.fullmatch(name)
                if not found or (found[3] == "after" and record.get(f"{found[1]}before") == value):
                    continue
                series = f"{found[2]}, {'W' if found[3] == 'before' else 'W + C'}"
                at_step[series] = max(value, at_step.get(series, 0.0))
            for series, value in at_step.items():
                largest.setdefault(series, {})[record["step"]] = value
    order = [f"{role}, {kind}" for role in ROLES for kind in ("W", "W + C")]
    return {series: sorted(largest[series].items()) for series in order if series in largest}


def _records(log: Path) -> list[dict]:
    """Return the lines of a log; the last one of a run that was killed may be cut short."""
    records = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records

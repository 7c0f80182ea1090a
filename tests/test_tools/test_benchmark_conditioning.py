"""The overhead table."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = "analysis_tools/benchmark_conditioning.py"
TINY = ["--arch", "nano-12", "--size", "32", "48", "--batch", "1", "--pairs", "2", "--mode", "both"]


def check(out, printed):
    """Check the table of ``TINY``, as CSV and as printed."""
    with out.open() as file:
        rows = {(row["step"], row["form"]): row for row in csv.DictReader(file)}
    trained = [("train", form) for form in ("stock", "identity")]
    assert list(rows) == [*trained, *(("inference", form) for form in ("stock", "identity", "folded"))]
    assert len({row["parameters"] for row in rows.values()}) == 1
    for (step, form), row in rows.items():
        assert float(row["lower_quartile"]) <= float(row["ratio"]) <= float(row["upper_quartile"])
        assert float(row["ratio"]) == 1 if form == "stock" else 0.1 < float(row["ratio"]) < 10
        assert float(row["milliseconds"]) > 0
        assert int(row["peak_mib"]) > 100
        assert f"| xcit nano-12 | 1 x 3 x 32 x 48 | {step} | {form} | " in printed


def test_table_has_both_steps_of_stock_identity_and_folded(monkeypatch, capsys, tmp_path):
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / SCRIPT))
    # An import of mmpretrain for each process would take most of the time of the test.
    monkeypatch.setitem(script["main"].__globals__, "in_fresh_process", lambda function, *args: function(*args))
    monkeypatch.setattr(sys, "argv", [SCRIPT, *TINY, "--out", str(tmp_path / "overhead.csv")])
    script["main"]()
    check(tmp_path / "overhead.csv", capsys.readouterr().out)


@pytest.mark.slow
def test_peak_memory_is_that_of_a_process_of_its_own(run_tool, tmp_path):
    out = tmp_path / "overhead.csv"
    large = ["--size", "384", "384", "--corrections", "identity-head", "--threads", "1"]
    result = run_tool(SCRIPT, *TINY, *large, "--out", out)
    assert result.returncode == 0, result.stderr
    with out.open() as file:
        peaks = {(row["step"], row["form"]): int(row["peak_mib"]) for row in csv.DictReader(file)}
    for form in ("stock", "identity-head"):
        assert peaks["train", form] > 1.05 * peaks["inference", form] > 100
    assert abs(peaks["train", "identity-head"] / peaks["train", "stock"] - 1) < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "1"], "at least 2 pairs"),
        (["--family", "xcit", "swin", "--arch", "tiny"], "size of one family"),
        (["--out", "table.txt"], "must end in .csv or .md"),
    ],
)
def test_settings_that_make_no_table_are_refused(arguments, message, monkeypatch, capsys):
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / SCRIPT))
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    with pytest.raises(SystemExit):
        script["main"]()
    assert message in capsys.readouterr().err

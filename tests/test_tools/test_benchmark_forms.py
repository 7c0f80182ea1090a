"""The comparison of the two ways to add lambda I to a projection."""

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "analysis_tools" / "benchmark_forms.py"
ROW = re.compile(r"  (.+?) +([\d.]+) ms  ratio ([\d.]+) \(([\d.]+)-([\d.]+)\)")


@pytest.fixture
def run(monkeypatch):
    def run(*options):
        monkeypatch.setattr(sys, "argv", ["benchmark_forms.py", *options])
        runpy.run_path(str(SCRIPT))["main"]()

    return run


def test_every_form_is_timed_in_both_precisions(run, capsys):
    run("--tokens", "64", "--dim", "32", "--heads", "4", "--pairs", "3")
    lines = capsys.readouterr().out.splitlines()
    assert "N 64, D 32, 3 pairs" in lines[0]
    assert [lines[1], lines[6]] == ["float32", "bfloat16 autocast"]
    for table in (lines[2:6], lines[7:11]):
        rows = [ROW.fullmatch(line).groups() for line in table]
        assert [name for name, *_ in rows] == [
            "plain",
            "lambda on the weight",
            "lambda x on the output",
            "conditioned_linear",
        ]
        assert rows[0][2:] == ("1.000", "1.000", "1.000")
        for _, _, ratio, lower, upper in rows:
            assert 0 < float(lower) <= float(ratio) <= float(upper)


def test_one_pair_has_no_quartiles(run, capsys):
    with pytest.raises(SystemExit):
        run("--pairs", "1")
    assert "at least 2 pairs" in capsys.readouterr().err

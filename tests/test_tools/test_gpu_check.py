"""The script for a machine with GPUs, in the reduced form that runs without one."""

import json

import pytest

from tests.helpers import run_tool, tool_output


@pytest.mark.slow
def test_every_section_runs_without_a_gpu(tmp_path):
    tool_output("experiments/gpu_check.py", "--out", tmp_path, "--device", "cpu", "--deadline", 280)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"tests", "attention", "conditioning", "detector"}
    assert all(row["status"] == "done" and row["table"] for row in rows)
    assert {entry["impl"] for row in rows if row["section"] == "attention" for entry in row["table"]} >= {
        "dark",
        "softmax",
    }
    page = (tmp_path / "results.md").read_text()
    assert "reduced form" in page and page.count("\n## ") == len(rows)


def test_what_fails_or_hangs_is_a_row(tmp_path):
    options = ("--out", tmp_path, "--only", "conditioning", "--device", "cpu", "--deadline", 0.1)
    assert run_tool("experiments/gpu_check.py", *options).returncode == 1
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["status"] == "past its deadline" and "past its deadline" in (tmp_path / "results.md").read_text()

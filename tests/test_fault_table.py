"""The table of faults counts what the tests say, and lists every fault that they inject."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = runpy.run_path(str(TESTS / "fault_table.py"))
EXAMPLE = """
FAULTS = {"cut": "a cut | it heals"}

def test_that_passes(record_property):
    for _ in range(3):
        record_property("fault", FAULTS["cut"])

def test_that_fails(record_property):
    record_property("fault", FAULTS["cut"])
    raise OSError

def test_without_faults(record_property):
    record_property("other", "value")
"""


def injecting_files():
    files = sorted(set(TESTS.rglob("test_*.py")) - {Path(__file__)})
    return [path for path in files if "\nFAULTS = " in path.read_text()]


def declared(path):
    """Return the dict ``FAULTS`` of a file."""
    (value,) = (
        node.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAULTS"
    )
    return ast.literal_eval(value)


def test_a_fault_of_a_failed_test_is_not_survived(tmp_path):
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=results.xml", "."]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=200).returncode == 1
    assert TABLE["fault_table"](tmp_path / "results.xml").splitlines()[2:] == [
        "| a cut | it heals | 4 | 3 |",
        "| all | | 4 | 3 |",
    ]


def test_the_table_lists_every_fault_and_no_other():
    rows = [row.strip("| ").split(" | ") for row in TABLE["split_readme"]()[1].splitlines()[2:-1]]
    assert {f"{fault} | {result}" for fault, result, _, _ in rows} == {
        fault for path in injecting_files() for fault in declared(path).values()
    }
    assert all(int(tried) == int(survived) > 0 for _, _, tried, survived in rows)


@pytest.mark.parametrize("path", injecting_files(), ids=lambda path: path.name)
def test_faults_are_recorded_by_their_declared_names(path):
    recorded = [
        node.args[1]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "record_property"
    ]
    assert recorded and all(isinstance(each, ast.Subscript) and each.value.id == "FAULTS" for each in recorded)

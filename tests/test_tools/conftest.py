"""Command lines of ``tools/`` on a toy classifier, each in a process of its own."""

import functools
import runpy
import sys

import pytest

from tests import helpers
from tests.helpers import ROOT, TOOLS, TOY


@pytest.fixture(scope="session")
def toy_config():
    return str(TOY / "config.py")


@pytest.fixture(scope="session")
def run_tool():
    """Return a function that runs ``tools/NAME`` with arguments."""
    return functools.partial(helpers.run_tool, path=(ROOT, TOY), timeout=200)


@pytest.fixture(scope="session")
def trained(run_tool, toy_config, tmp_path_factory):
    """The work folder of two iterations with ``--amp``, and what the run printed."""
    folder = tmp_path_factory.mktemp("trained")
    result = run_tool("train.py", toy_config, "--work-dir", folder, "--amp")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout + result.stderr


@pytest.fixture
def call_tool(monkeypatch, capsys, loaders):
    """Return a function that runs ``tools/NAME`` in this process: exit status, standard output and errors."""

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(str(TOOLS / name), run_name="__main__")
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call

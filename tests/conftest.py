"""Fixtures that keep tests apart, and a tiny trained run of the quick-start model."""

import sys
from collections import OrderedDict

import pytest
from mmengine.registry import DefaultScope

from tests.helpers import QUICKSTART, ROOT, TINY, output_of, tool_output


@pytest.fixture(autouse=True)
def default_scope_of_its_own(monkeypatch):
    """A Runner sets mmengine's default scope for the whole process; start without one and restore it afterwards."""
    monkeypatch.setattr(DefaultScope, "_instance_dict", OrderedDict())


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """torch.compile gives up on a function that it compiled too often, in whichever test."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def loaders(monkeypatch):
    """Restore mmengine's loaders and torch's switches after the test, which our tools set for the process."""
    from mmengine.runner.checkpoint import CheckpointLoader

    from mmspectral.compat.checkpoints import FORCE_SAFE, FORCE_UNSAFE

    monkeypatch.setattr(CheckpointLoader, "_schemes", CheckpointLoader._schemes.copy())
    monkeypatch.setattr("mmspectral.compat.checkpoints._trusted", False)
    for name in (FORCE_SAFE, FORCE_UNSAFE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def run_command():
    """Return a function that runs a command with this checkout on its path and fails the test if it fails."""

    def run(*command, cwd=None, path=()):
        return output_of(*command, cwd=cwd, path=(ROOT, *path))

    return run


@pytest.fixture(scope="session")
def trained_quickstart(tmp_path_factory):
    """Work folder of a finished tiny run."""
    work_dir = tmp_path_factory.mktemp("trained_quickstart")
    tool_output("train.py", QUICKSTART, "--work-dir", work_dir, "--cfg-options", *TINY)
    return work_dir

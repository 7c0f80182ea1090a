"""What several test files need: command lines run as users do, and a tiny trained run of the quick-start model."""

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from mmengine.registry import DefaultScope

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart" / "mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"
# Nothing of an earlier test or of a launcher may leak into a command.
OWNED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_FORCE_WEIGHTS_ONLY_LOAD")
# One epoch of two iterations, four images to validate on, everything in the main process.
TINY = [
    "train_cfg.max_epochs=1",
    "train_cfg.val_interval=1",
    "train_dataloader.batch_size=2",
    "train_dataloader.dataset.num_images=5",
    "val_dataloader.dataset.num_images=4",
    "test_dataloader.dataset.num_images=4",
    *(f"{part}_dataloader.num_workers=0" for part in ("train", "val", "test")),
    *(f"{part}_dataloader.persistent_workers=False" for part in ("train", "val", "test")),
    "param_scheduler=[]",
]


@pytest.fixture(autouse=True)
def default_scope_of_its_own(monkeypatch):
    """A Runner sets mmengine's default scope for the whole process; start without one and take it back afterwards."""
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
    for name in (FORCE_SAFE, FORCE_UNSAFE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def run_command():
    """Return a function that runs a command with this checkout on its path and fails the test if it fails."""

    def run(*command, cwd=None, path=()):
        environment = {key: value for key, value in os.environ.items() if key not in OWNED}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, path), environment.get("PYTHONPATH", "")])
        environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="-1", MMSPECTRAL_PYTHON=sys.executable)
        result = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=environment, cwd=cwd, timeout=290
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, f"{command}:\n{output[-4000:]}"
        return output

    return run


@pytest.fixture(scope="session")
def tiny_options():
    """``--cfg-options`` that make two iterations of the quick-start config."""
    return list(TINY)


@pytest.fixture(scope="session")
def quickstart_config():
    return QUICKSTART


@pytest.fixture(scope="session")
def trained_quickstart(run_command, tmp_path_factory):
    """Work folder of a finished tiny run."""
    work_dir = tmp_path_factory.mktemp("trained_quickstart")
    run_command(sys.executable, ROOT / "tools" / "train.py", QUICKSTART, "--work-dir", work_dir, "--cfg-options", *TINY)
    return work_dir

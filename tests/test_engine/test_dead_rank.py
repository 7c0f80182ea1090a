"""A rank that dies, or hangs, ends the job of tools/dist_train.sh with a non-zero status and the cause."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "data" / "toy_classification"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PORT", "NNODES")
TIMEOUT = 30  # seconds that ranks wait for each other


def start(folder, how):
    """Start two ranks, of which the second ends in that way."""
    folder.mkdir()
    config = folder / "toy.py"
    config.write_text(
        f"_base_ = {str(TOY / 'config.py')!r}\n"
        "custom_imports = dict(imports=['toy_classification', 'dying_rank'])\n"
        f"custom_hooks = [dict(type='DyingRank', how={how!r})]\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    paths = [str(TOY), str(ROOT / "tests" / "test_engine"), os.environ.get("PYTHONPATH", "")]
    environment.update(PYTHONPATH=os.pathsep.join(paths), MMSPECTRAL_PYTHON=sys.executable)
    # How long torchrun lets a rank that does not react live on; 30 seconds by default.
    environment.update(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="-1")
    command = ["bash", str(ROOT / "tools" / "dist_train.sh"), str(config), "2", "--work-dir", str(folder)]
    command += ["--cfg-options", f"env_cfg.dist_cfg.timeout={TIMEOUT}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **pipes)


def finish(process):
    """Return status and output; a job that hangs fails the test and leaves nothing behind."""
    try:
        output = process.communicate(timeout=200)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


@pytest.mark.fault
def test_a_rank_that_dies_or_raises_ends_the_job(tmp_path):
    jobs = {}
    for how in ("SIGKILL", "raise"):
        jobs[how] = start(tmp_path / how, how)
    found = {how: finish(job) for how, job in jobs.items()}
    causes = {"SIGKILL": r"Signal 9 \(SIGKILL\) received by PID", "raise": "ArithmeticError: rank 1 met something odd"}
    for how, (status, output) in found.items():
        assert status != 0
        assert re.search(causes[how], output), output
        assert re.search(r"rank +: 1 ", output), "torchrun's summary names the rank"
        assert not (tmp_path / how / "iter_2.pth").exists()


@pytest.mark.slow
@pytest.mark.fault
def test_a_rank_that_hangs_is_waited_for_as_long_as_the_config_says(tmp_path):
    """A frozen machine: its process is there, so only the timeout of the other ranks tells (else 30 minutes)."""
    status, output = finish(start(tmp_path / "job", "SIGSTOP"))
    assert status != 0
    assert re.search(rf"[Tt]imed out.*{TIMEOUT}000 ?ms", output), output

"""The shell scripts around set-up and launching, with stand-ins for what they start."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmspectral.compat.environment import family_in_use
from tests.helpers import ROOT, TOOLS
from tests.helpers import run as run_command

run = functools.partial(run_command, PYTHONPATH="")


def program(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.fixture
def recorder(tmp_path):
    """A program that prints its arguments as a JSON list."""
    script = tmp_path / "record.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    return program(tmp_path / "recorder" / "record", f'exec "{sys.executable}" "{script}" "$@"')


SOURCE = f"""
set -euo pipefail
source "{TOOLS}/setup_env.sh"
printf '%s\\n' "$MMSPECTRAL_PYTHON" "$MMSPECTRAL_SETUP_SECONDS" "${{PATH%%:*}}" "${{PYTHONPATH%%:*}}"
"""


def test_active_environment_that_satisfies_is_used_as_it_is(tmp_path):
    # This interpreter's environment is one: the tests run in it.
    done = run("bash", "-c", SOURCE, VIRTUAL_ENV=sys.prefix, MMSPECTRAL_VENV=tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    python, _, first_on_path, first_on_pythonpath = done.stdout.splitlines()
    assert Path(python).parent == Path(first_on_path) == Path(sys.prefix) / "bin"
    assert first_on_pythonpath == str(ROOT)
    assert "as it is" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def failed_set_up(tmp_path):
    """Return a function that runs the set-up of ``tmp_path/venv`` where it fails, and returns what it said.

    Python lacks everything there and cannot make virtual environments.
    """
    program(tmp_path / "bin" / "python3", '[[ "$1" == -c ]] || exit 1', f'[[ "$2" != *print* ]] || echo {tmp_path}')
    program(tmp_path / "active" / "bin" / "python", "exit 1")
    unsatisfied = {"VIRTUAL_ENV": tmp_path / "active", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def set_up(**variables):
        done = run("bash", "-c", SOURCE, **{"MMSPECTRAL_VENV": tmp_path / "venv", **unsatisfied, **variables})
        assert done.returncode == 1 and done.stdout == ""
        return done.stderr

    return set_up


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path, failed_set_up):
    precious = tmp_path / "home" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    said = failed_set_up(MMSPECTRAL_VENV=precious.parent)
    assert "is not empty and not a virtual environment; set MMSPECTRAL_VENV to another folder" in said
    assert precious.read_text() == "years of work"


def test_an_active_environment_of_the_other_family_is_not_used(tmp_path, failed_set_up):
    other, folder = ("onedl", "venv") if family_in_use() == "openmmlab" else ("openmmlab", "venv-openmmlab")
    said = failed_set_up(VIRTUAL_ENV=sys.prefix, MMSPECTRAL_STACK=other)
    assert f"making a virtual environment at {tmp_path / folder} with" in said


@pytest.mark.parametrize("command", [["setup_env.sh"], ["run_tests.sh", "--stack", "mm"]])
def test_an_unknown_family_is_refused(tmp_path, command):
    venv = tmp_path / "venv"
    done = run("bash", TOOLS / command[0], *command[1:], MMSPECTRAL_STACK="mm", MMSPECTRAL_VENV=venv)
    assert done.returncode == 1 and "MMSPECTRAL_STACK is 'mm'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("finished", [True, False])
def test_the_second_environment_shares_the_torch_of_a_finished_first_one(tmp_path, failed_set_up, finished):
    file = Path("lib/python3.11/site-packages/torch/__init__.py")
    first, second = tmp_path / "venv", tmp_path / "venv-openmmlab"
    (first / file).parent.mkdir(parents=True)
    (first / file).write_text("")
    if finished:
        (first / ".mmspectral-stamp").write_text("")
    site = second / file.parents[1]
    program(tmp_path / "bin" / "python3", f'[[ "$1" != -m ]] || mkdir -p {site}')
    failed_set_up(MMSPECTRAL_STACK="openmmlab")  # there is no pip to go on with
    assert site.is_dir()
    assert (second / file).exists() == finished
    assert not finished or (second / file).samefile(first / file)


def test_interrupted_set_up_is_repeated(tmp_path, failed_set_up):
    leftover = tmp_path / "venv" / "lib" / "half-installed"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("")
    (tmp_path / "venv" / ".mmspectral-unfinished").write_text("")
    said = failed_set_up()
    assert "was interrupted; making it again" in said and "apt-get install python3-venv" in said
    assert not leftover.exists()
    assert (tmp_path / "venv" / ".mmspectral-unfinished").exists(), "the next run could not tell that this one failed"


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock, set-ups do not wait for each other")
def test_only_one_set_up_at_a_time(tmp_path, failed_set_up):
    venv = tmp_path / "venv"
    holder = subprocess.Popen(
        ["flock", f"{venv}.lock", "bash", "-c", "echo held; sleep 1.5"], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    assert "waiting for another set-up" in failed_set_up()
    assert holder.poll() == 0, "the set-up went on while the lock was held"


@pytest.mark.parametrize("script", ["dist_train", "dist_test", "slurm_train", "slurm_test"])
def test_launchers_explain_themselves_when_arguments_are_missing(script):
    done = run("bash", TOOLS / f"{script}.sh", "config.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"usage: bash tools/{script}.sh " in done.stderr


ALONE = ["--nnodes", "1", "--standalone", "--local-addr", "127.0.0.1"]
SEVERAL = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "PORT": "29123"}
SEVERAL_FLAGS = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29123"]


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "flags"),
    [
        ("train", ["a config.py"], {}, ALONE),
        ("test", ["a config.py", "a model.pth"], {}, ALONE),
        ("train", ["a config.py"], SEVERAL, SEVERAL_FLAGS),
    ],
)
def test_distributed_launch(recorder, script, arguments, variables, flags):
    extra = ["--cfg-options", "a.b=[1, 2]", ""]
    command = ("bash", TOOLS / f"dist_{script}.sh", *arguments, "4", *extra)
    got = json.loads(run(*command, MMSPECTRAL_PYTHON=recorder, **variables).stdout)
    at = got.index(str(TOOLS / f"{script}.py"))
    assert got[at + 1 :] == [*arguments, "--launcher", "pytorch", *extra]
    assert got[:2] == ["-m", "torch.distributed.run"]
    assert sorted(got[2:at]) == sorted([*flags, "--nproc-per-node", "4"])


@pytest.mark.parametrize(("script", "option"), [("train", ["--work-dir"]), ("test", [])])
def test_slurm_launch(recorder, script, option):
    recorder.rename(recorder.with_name("srun"))
    variables = dict(GPUS=4, SRUN_ARGS="--time 1:00:00 --exclusive", MMSPECTRAL_PYTHON="the python")
    variables["PATH"] = f"{recorder.parent}:{os.environ['PATH']}"
    given = ("gpu", "a job", "a config.py", "last one", "--resume")
    got = json.loads(run("bash", TOOLS / f"slurm_{script}.sh", *given, **variables).stdout)
    at, tool = got.index("the python"), str(TOOLS / f"{script}.py")
    wanted = [tool, "a config.py", *option, "last one", "--launcher", "slurm", "--resume"]
    assert got[at:] == ["the python", "-u", *wanted]
    assert got[:4] == ["--partition", "gpu", "--job-name", "a job"]
    assert got[4:8] == ["--ntasks", "4", "--ntasks-per-node", "4"]
    assert got[at - 3 : at] == ["--time", "1:00:00", "--exclusive"]

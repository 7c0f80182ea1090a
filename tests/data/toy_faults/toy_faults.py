"""Run command lines of tools/ in processes that die by SIGKILL, or meet a full disk, at a given moment."""

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.helpers import DATA, ROOT, TOOLS, TOY, environment

# Audit events of Python that end a save: the hidden file is there and empty, complete, renamed.
_SAVING = {"os.chmod": "tmp", "os.rename": "tmp", "os.remove": "pth"}
_death = {"event": None, "after": 0}


def tick(event):
    if event == _death["event"]:
        _death["after"] -= 1
        if _death["after"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _audit(event, arguments):
    if event in _SAVING and str(arguments[0]).endswith(_SAVING[event]):
        tick(event)


@HOOKS.register_module()
class Doom(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        tick("step")

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        tick("evaluation")
        if runner.epoch == runner.max_epochs:
            tick("last evaluation")


def run_tool(name, *arguments, log, death=(None, 0), largest_file=None, seconds=None):
    """Run a script of ``tools/`` in its own process; return the exit status, negative for a signal, and the output.

    Args:
        name: File name of the script.
        *arguments: Of the command line.
        log: File that takes the output.
        death: An event and its number: that one kills the process.
        largest_file: Bytes after which a write fails, as on a full disk.
        seconds: Time after which the process is killed.
    """
    task = json.dumps([str(TOOLS / name), list(map(str, arguments)), death, largest_file])
    command = [sys.executable, "-c", "import sys, toy_faults; toy_faults.be_tool(sys.argv[1])", task]
    with open(log, "w") as file:
        try:
            status = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment([ROOT, DATA / "toy_faults", TOY]),
                timeout=seconds or 250,
            ).returncode
        except subprocess.TimeoutExpired:
            if seconds is None:
                raise
            status = -signal.SIGKILL
    return status, Path(log).read_text()


def be_tool(task):
    path, arguments, death, largest_file = json.loads(task)
    _death.update(event=death[0], after=death[1])
    sys.addaudithook(_audit)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")

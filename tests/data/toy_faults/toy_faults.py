"""Run command lines of tools/ in processes that die by SIGKILL, or meet a full disk, at a given moment."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.helpers import DATA, ROOT, TOOLS, TOY, fork, run_script

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


@HOOKS.register_module()
class NoteSamples(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        samples = [sample.sample_idx for sample in data_batch["data_samples"]]
        with Path(runner.work_dir, "samples.json").open("a") as file:
            print(json.dumps([runner.iter, samples]), file=file)


def run_tool(name, *arguments, death=(None, 0), largest_file=None, seconds=None):
    """Run a script of ``tools/``; return the exit status, negative for a signal, and what it printed.

    Args:
        name: File name of the script.
        *arguments: Of the command line.
        death: An event and its number: that one kills the process.
        largest_file: Bytes after which a write fails, as on a full disk.
        seconds: Time after which the process is killed.
    """
    path = [ROOT, DATA / "toy_faults", TOY]
    task = (json.dumps([death, largest_file]), TOOLS / name, *arguments)
    done = fork(be_tool, *task, path=path, timeout=seconds or 250)
    return done.returncode, done.stdout + done.stderr


def be_tool(task, path, *arguments):
    (event, after), largest_file = json.loads(task)
    _death.update(event=event, after=after)
    sys.addaudithook(_audit)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    run_script(path, *arguments)

"""Two trainings in one folder, and what a refused one leaves behind."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from mmspectral.engine import work_folder
from mmspectral.engine.work_folder import NAME, locked
from mmspectral.errors import UsageError
from tests.helpers import ROOT, TOY, run_tool


def owned(work_dir, **changes):
    """Write the file of an owner like this process, but for the changes."""
    with locked(str(work_dir)):
        content = json.loads((work_dir / NAME).read_text())
    content.update(changes)
    (work_dir / NAME).write_text(json.dumps(content))
    return content


def files(folder):
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.fault
def test_the_second_training_is_refused_while_the_first_lives(tmp_path, ranks):
    launcher = ["--launcher", "pytorch"] if ranks > 1 else []
    arguments = (TOY / "config.py", "--work-dir", tmp_path, *launcher)
    with locked(str(tmp_path)):
        result = run_tool("train.py", *arguments, path=(ROOT, TOY), ranks=ranks)
        assert result.returncode == 2 and files(tmp_path) == [NAME]
        message = f"train.py: error: Another training, process {os.getpid()} on "
        assert sum(line.startswith(message) for line in result.stderr.splitlines()) == ranks
    assert files(tmp_path) == []


@pytest.mark.parametrize("ended", ["gone", "zombie"])
@pytest.mark.fault
def test_a_dead_owner_on_this_machine_is_replaced_at_once(tmp_path, ended):
    process = subprocess.Popen([sys.executable, "-c", ""])
    owner = work_folder._identity(os.getpid())[:-2] + [process.pid, "0"]
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie until somebody waits for it
    if ended == "gone":
        process.wait()
    owned(tmp_path, owner=owner)
    with locked(str(tmp_path)):
        assert files(tmp_path) == [NAME]
    process.wait()


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path):
    owned(tmp_path, owner=[*work_folder._identity(os.getpid())[:-1], "0"])
    with locked(str(tmp_path)):
        pass


@pytest.mark.parametrize("content", ["", "[]", '{"owner": null}', '{"owner": ["x"]}'])
def test_a_torn_file_and_that_of_a_copied_folder_say_nothing(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with locked(str(tmp_path)):
        pass
    owned(tmp_path, owner=work_folder._identity(os.getpid()), folder=0)
    with locked(str(tmp_path)):
        pass


@pytest.mark.parametrize("beating", [False, True])
def test_an_owner_on_another_machine_lives_as_long_as_it_counts(tmp_path, monkeypatch, beating):
    monkeypatch.setattr(work_folder, "INTERVAL", 0.5)
    content = owned(tmp_path, owner=["elsewhere", "boot", "space", 1, "0"])
    if not beating:
        with locked(str(tmp_path)):
            assert json.loads((tmp_path / NAME).read_text())["owner"] != content["owner"]
        return
    ended = threading.Event()
    thread = threading.Thread(target=work_folder._beat, args=(tmp_path / NAME, content, ended))
    thread.start()
    with pytest.raises(UsageError, match="process 1 on elsewhere, writes to"), locked(str(tmp_path)):
        pass
    ended.set()
    thread.join()


def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with locked(str(tmp_path)) as note:
        assert "cannot be locked (Operation not permitted)" in note and files(tmp_path) == []


@pytest.mark.parametrize("option", ["model.backbone.type=Nonsense", "load_from=WEIGHTS"])
def test_a_refused_config_leaves_no_folder(tmp_path, option):
    """Whether its model cannot be built, or its weights do not fit."""
    torch.save(dict(state_dict=dict(weight=torch.ones(1))), tmp_path / "weights.pth")
    options = (
        "--work-dir",
        tmp_path / "run",
        "--cfg-options",
        option.replace("WEIGHTS", str(tmp_path / "weights.pth")),
    )
    result = run_tool("train.py", TOY / "config.py", *options, path=(ROOT, TOY))
    assert result.returncode != 0 and files(tmp_path) == ["weights.pth"]

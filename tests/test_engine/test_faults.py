"""Damaged images, disks and folders, another architecture, and seeds: what a run says and what it leaves alone."""

import functools
import json
import os
import random
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import worker_init_fn
from mmengine.model import BaseModule
from torch.utils.data import DataLoader

from mmspectral.checkpoints import write_checkpoint
from mmspectral.compat.atomic_write import FileWriteError
from mmspectral.compat.checkpoints import load_from_local
from mmspectral.engine.hooks.exact_resume import seed_worker
from mmspectral.engine.runner.launch import require_writable
from mmspectral.engine.runner.resume import choose_checkpoint
from mmspectral.errors import DamagedCheckpointError, UsageError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "data" / "toy_faults" / "config.py"


@pytest.fixture(scope="module")
def train():
    """Return a function that trains the toy and returns the exit status and the log."""
    sys.path.insert(0, str(CONFIG.parent))
    from toy_faults import run_tool

    def run(work_dir, *arguments, **moments):
        log = Path(work_dir).with_suffix(".log")
        return run_tool("train.py", CONFIG, "--work-dir", work_dir, *arguments, log=log, **moments)

    yield run
    sys.path.remove(str(CONFIG.parent))


@pytest.mark.slow
@pytest.mark.fault
def test_training_meets_a_full_disk_and_another_architecture(train, tmp_path):
    """The first save fails, by option training goes on; then the config changes. A checkpoint has more than 300 kB."""
    work_dir = tmp_path / "run"
    status, log = train(work_dir, largest_file=100_000)
    assert status == 1 and "epoch_1.pth" in log and "could not be written: File too large" in log
    assert not list(work_dir.glob("*.pth")) and not list(work_dir.glob(".*.tmp"))
    option = [
        "--cfg-options",
        "default_hooks.checkpoint.tolerated_failures=9",
        "default_hooks.checkpoint.save_best=None",
    ]
    status, log = train(work_dir, *option, largest_file=100_000)
    assert status == 1 and log.count("tolerated; training goes on") == 4
    assert "the last 4 saves failed" in log and "accuracy/top1" in log
    assert train(work_dir)[0] == 0
    before = {path: path.read_bytes() for path in work_dir.glob("*.pth")}
    wider = ["--cfg-options", "model.backbone.arch.feedforward_channels=48"]
    status, log = train(work_dir, "--resume", *wider)
    assert status == 2
    last = log.splitlines()[-1]
    assert "epoch_4.pth is that of another model" in last and "[32, 16] there and [48, 16] in the model" in last
    assert before == {path: path.read_bytes() for path in work_dir.glob("*.pth")}


@pytest.mark.fault
def test_a_file_in_the_place_of_the_work_folder(tmp_path):
    (tmp_path / "work").write_text("mine")
    for folder in (tmp_path / "work", tmp_path / "work" / "below"):
        with pytest.raises(UsageError, match=r"work.* cannot be written.*--work-dir"):
            require_writable(str(folder))
    assert (tmp_path / "work").read_text() == "mine"
    require_writable(str(tmp_path / "new" / "work"))
    assert (tmp_path / "new" / "work").is_dir() and not list((tmp_path / "new" / "work").iterdir())


@pytest.mark.fault
def test_a_read_only_work_folder():
    """Permissions do not bind root, which becomes somebody else for a moment."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as parent:  # pytest's folders are closed to others
        os.chmod(parent, 0o755)
        folder = Path(parent, "work")
        folder.mkdir(mode=0o555)
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(UsageError, match=r"work cannot be written: Permission denied.*--work-dir"):
                require_writable(str(folder))
        finally:
            os.seteuid(user)
        assert not list(folder.iterdir())


@pytest.mark.fault
def test_a_full_disk_leaves_the_checkpoint_that_was_to_be_replaced(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(FileWriteError, match=r"weights.pth .* could not be written.*MiB free.*is as it was"):
            write_checkpoint(dict(state_dict=dict(weight=torch.ones(1000))), path, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError):
        write_checkpoint(dict(state_dict={}), path)


@pytest.mark.parametrize("fault", ["truncated weights", "flipped bit"])
@pytest.mark.fault
def test_damaged_weights_are_named(tmp_path, safe_loading, fault):
    """Also those of a model that is not ours."""
    path = tmp_path / "weights.pth"
    torch.save(dict(state_dict=torch.nn.Linear(64, 64).state_dict()), path)
    load_from_local(str(path))
    content = bytearray(path.read_bytes())
    if fault == "flipped bit":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: -1 if fault == "truncated weights" else None])
    model = BaseModule(init_cfg=dict(type="Pretrained", checkpoint=str(path)))
    for load in (model.init_weights, functools.partial(load_from_local, str(path))):
        with pytest.raises(DamagedCheckpointError, match=r"weights.pth is damaged: its .*Copy or download it again"):
            load()


def test_the_folder_of_a_sharded_checkpoint_is_resumed_as_it_is(tmp_path):
    """FlexibleRunner's strategies write such; only they can read them."""
    (tmp_path / "epoch_2.pth").mkdir()
    torch.save({}, tmp_path / "epoch_1.pth")
    cfg = Config(dict(work_dir=str(tmp_path), resume=True))
    assert choose_checkpoint(cfg) == [] and cfg.load_from == str(tmp_path / "epoch_2.pth")


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002 - as transforms do


def test_workers_draw_what_the_main_process_decides():
    """Other numbers in each epoch, and in each worker, and the same ones again from the same seed."""
    stock = functools.partial(worker_init_fn, num_workers=2, rank=0, seed=0)

    def epochs(init_fn):
        torch.manual_seed(5)
        loader = DataLoader(Draws(), batch_size=None, num_workers=2, worker_init_fn=init_fn)
        return [json.dumps(list(loader)) for _ in range(2)]

    ours = functools.partial(seed_worker, first=stock)
    first, second = epochs(ours)
    assert first != second and epochs(ours) == [first, second]
    assert len({number for sample in json.loads(first) for number in sample}) == 12
    first, second = epochs(stock)
    assert first == second, "mmengine's repeats its numbers in each epoch"

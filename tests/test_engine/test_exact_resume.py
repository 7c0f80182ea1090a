"""Runs that are killed at any moment and resumed end like an uninterrupted one."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mmspectral.compat.checkpoint_damage import find_damage

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "data" / "toy_faults" / "config.py"
# Events of toy_faults.py: inside an epoch, inside a validation, at three points of a save, after the last epoch.
MOMENTS = ["step", "evaluation", "os.chmod", "os.rename", "os.remove"]
DEATHS = [("step", 2), ("step", 6), *((moment, 1) for moment in MOMENTS[1:]), ("last evaluation", 2)]
OFF = ["--cfg-options", "fault_tolerance=False"]


@pytest.fixture(scope="module")
def train():
    """Return a function that trains the toy and returns the exit status and the log."""
    sys.path.insert(0, str(CONFIG.parent))
    from toy_faults import run_tool

    def run(work_dir, *arguments, **moments):
        return run_tool("train.py", CONFIG, "--work-dir", work_dir, *arguments, log=work_dir / "output.log", **moments)

    yield run
    sys.path.remove(str(CONFIG.parent))


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    """Work folder of an uninterrupted run."""
    work_dir = tmp_path_factory.mktemp("straight")
    status, log = train(work_dir)
    assert status == 0, log
    return work_dir


def state(path):
    return torch.load(path, weights_only=False, map_location="cpu")


def assert_same(a, b, where):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def assert_same_run(straight, resumed, last="epoch_4.pth"):
    """Weights, averages, optimizer, schedules, and all losses and metrics of both runs are equal, bit for bit."""
    a, b = state(straight / last), state(resumed / last)
    for key in ("state_dict", "ema_state_dict", "optimizer", "param_schedulers"):
        assert (key in a) == (key in b)
        if key in a:
            assert_same(a[key], b[key], key)
    ours, others = (checkpoint["message_hub"]["log_scalars"] for checkpoint in (a, b))
    compared = [name for name in ours if "time" not in name]
    assert "train/loss" in compared and any(name.startswith("val/") for name in compared)
    for name in compared:
        np.testing.assert_array_equal(ours[name]._log_history, others[name]._log_history, err_msg=name)
    assert metrics(straight) == metrics(resumed)


def metrics(work_dir):
    """Return the metrics that the newest run wrote last."""
    newest = max(work_dir.glob("*/vis_data/scalars.json"), key=lambda file: file.parts)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    last = [row for row in rows if "loss" not in row][-1]
    return {name: value for name, value in last.items() if "time" not in name}


def checkpoints(work_dir):
    return sorted(path.name for path in work_dir.glob("*.pth"))


def whole(work_dir):
    return [path.name for path in work_dir.glob("epoch_*.pth") if find_damage(path) is None]


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param([("os.rename", 3), ("last evaluation", 2)], id="two kills"),
        pytest.param(DEATHS, id="each kind of moment", marks=pytest.mark.slow),
    ],
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(train, straight, tmp_path, deaths):
    for death in deaths:
        before = whole(tmp_path)
        status, log = train(tmp_path, "--resume", death=death)
        assert status == -9, (death, log)
        assert not before or whole(tmp_path), "there is always a checkpoint that can be loaded"
        assert ("resumed epoch" in log) == bool(before)
    status, log = train(tmp_path, "--resume")
    assert status == 0, log
    assert "Validating the checkpoint: this was due at iteration 16" in log
    assert "Epoch(train)" not in log, "only the metrics were missing"
    assert_same_run(straight, tmp_path)
    assert checkpoints(tmp_path) == checkpoints(straight), "none was left over or lost"
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.slow
def test_without_it_a_resumed_run_differs(train, tmp_path):
    """The switch leaves the config alone, and then the tests above would fail."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    assert train(straight, *OFF)[0] == 0
    assert train(resumed, *OFF, death=("step", 10))[0] == -9
    status, log = train(resumed, "--resume", *OFF)
    assert status == 0, log
    a, b = (state(folder / "epoch_4.pth")["state_dict"] for folder in (straight, resumed))
    assert not all(torch.equal(a[name], b[name]) for name in a)
    assert "mmspectral.EpochSeedHook" not in (resumed / "config.py").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_twenty_times_at_random(train, straight, tmp_path):
    """One run after the other is killed until it ends by itself, at moments of which a third is any time."""
    draw = random.Random(0)
    kills, finished, status = 0, 0, None
    while kills < 20 or status == -9:
        work_dir = tmp_path / str(finished)
        work_dir.mkdir(exist_ok=True)
        before = whole(work_dir)
        moment = draw.choice([*MOMENTS, None, None])
        how = dict(seconds=draw.uniform(5, 15)) if moment is None else dict(death=(moment, draw.randint(1, 3)))
        status, log = train(work_dir, "--resume", **(how if kills < 20 else {}))
        assert status in (0, -9), log
        assert not before or whole(work_dir), how
        kills += status == -9
        if status == 0:
            assert_same_run(straight, work_dir)
            assert checkpoints(work_dir) == checkpoints(straight)
            finished += 1

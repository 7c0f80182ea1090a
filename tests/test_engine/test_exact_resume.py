"""Runs that are killed at any moment and resumed end like an uninterrupted one, with DARK attention and its redraws."""

import functools
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from mmspectral.compat.checkpoint_damage import find_damage

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "data" / "toy_faults" / "config.py"
# Events of toy_faults.py: the writing of a checkpoint begins (os.chmod), it is complete but unnamed (os.rename), the
# oldest one is about to be deleted (os.remove).
MOMENTS = ["step", "evaluation", "os.chmod", "os.rename", "os.remove"]
DEATHS = [("step", 2), ("step", 6), *((moment, 1) for moment in MOMENTS[1:]), ("last evaluation", 2)]


@pytest.fixture(scope="module", autouse=True)
def toys():
    sys.path.insert(0, str(CONFIG.parent))
    yield
    sys.path.remove(str(CONFIG.parent))


@pytest.fixture(scope="module")
def train():
    """Return a function that trains the toy and returns the exit status and the log."""
    from toy_faults import run_tool

    def run(work_dir, *arguments, config=CONFIG, **moments):
        return run_tool(
            "train.py", config, "--work-dir", work_dir, *arguments, log=Path(work_dir, "output.log"), **moments
        )

    return run


@pytest.fixture(scope="module")
def same_run():
    from same_run import assert_same_run

    return assert_same_run


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    """Work folder of an uninterrupted run."""
    work_dir = tmp_path_factory.mktemp("straight")
    status, log = train(work_dir)
    assert status == 0, log
    state = torch.load(work_dir / "epoch_4.pth", weights_only=False)["state_dict"]
    assert state["backbone.layers.1.attn.kernel.redraws"] == 7
    return work_dir


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
@pytest.mark.fault
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(train, straight, same_run, tmp_path, deaths):
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
    same_run(straight, tmp_path, "epoch_4.pth")
    assert checkpoints(tmp_path) == checkpoints(straight), "none was left over or lost"
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.slow
def test_without_it_a_resumed_run_differs(train, tmp_path):
    """With mmengine's own hooks the tests above would fail."""
    config = tmp_path / "stock.py"
    config.write_text(
        f"_base_ = {str(CONFIG)!r}\n"
        "hooks = dict(logger=dict(type='LoggerHook'), checkpoint=dict(type='CheckpointHook'))\n"
        "default_hooks = dict(hooks, _delete_=True)\n"
    )
    train = functools.partial(train, config=config)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    assert train(straight)[0] == 0
    assert train(resumed, death=("step", 10))[0] == -9
    status, log = train(resumed, "--resume")
    assert status == 0, log
    a, b = (torch.load(folder / "epoch_4.pth", weights_only=False)["state_dict"] for folder in (straight, resumed))
    assert not all(torch.equal(a[name], b[name]) for name in a)
    assert "Off in this config: exact resume, atomic checkpoints" in log


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.fault
def test_killed_twenty_times_at_random(train, straight, same_run, tmp_path):
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
        if status == -9:
            kills += 1
        if status == 0:
            same_run(straight, work_dir, "epoch_4.pth")
            assert checkpoints(work_dir) == checkpoints(straight)
            finished += 1


@pytest.fixture
def iterations_config(tmp_path, monkeypatch):
    """Return a function that writes the toy's config for an iteration-based loop, which notes its samples."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "noting.py").write_text(
        "import json, pathlib\n"
        "from mmengine.hooks import Hook\n"
        "from mmengine.registry import HOOKS\n"
        "@HOOKS.register_module()\n"
        "class Noting(Hook):\n"
        "    def before_train_iter(self, runner, batch_idx, data_batch=None):\n"
        "        samples = [sample.sample_idx for sample in data_batch['data_samples']]\n"
        "        with pathlib.Path(runner.work_dir, 'samples.json').open('a') as file:\n"
        "            print(json.dumps([runner.iter, samples]), file=file)\n"
    )

    def write(sampler):
        path = tmp_path / "iterations.py"
        path.write_text(
            f"_base_ = {str(CONFIG)!r}\n"
            "custom_imports = dict(imports=['toy_classification', 'toy_faults', 'noting'])\n"
            "train_cfg = dict(_delete_=True, by_epoch=False, max_iters=8, val_interval=8)\n"
            "param_scheduler = dict(_delete_=True, type='ConstantLR', factor=1.0, by_epoch=False)\n"
            "default_hooks = dict(checkpoint=dict(by_epoch=False, interval=2))\n"
            f"train_dataloader = dict(sampler=dict(_delete_=True, type={sampler!r}, shuffle=True))\n"
            "custom_hooks = [dict(type='Noting'), dict(type='Doom')]\n"
        )
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["DefaultSampler", "InfiniteSampler"])
@pytest.mark.fault
def test_a_killed_iteration_based_run_repeats_no_data(train, iterations_config, tmp_path, sampler):
    """Two passes over 16 samples; killed in the sixth iteration, after the checkpoint of the fourth."""
    config = iterations_config(sampler)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    assert train(straight, config=config)[0] == 0
    status, log = train(resumed, config=config, death=("step", 6))
    assert status == -9, log
    status, log = train(resumed, "--resume", config=config)
    assert status == 0, log

    seen, again = (
        [json.loads(line) for line in (folder / "samples.json").read_text().splitlines()]
        for folder in (straight, resumed)
    )
    assert [iteration for iteration, _ in again] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert again[:6] == seen[:6] and again[6:] == seen[4:]
    assert sorted(sum((samples for _, samples in seen[4:]), [])) == list(range(16)), "the second pass"

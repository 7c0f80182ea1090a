"""Runs that are killed at any moment and resumed end like an uninterrupted one, also in when they stop early."""

import functools
import json
import random
import uuid
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import mmengine.hooks
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import worker_init_fn
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, Runner
from mmpretrain.registry import TRANSFORMS as MMPRETRAIN_TRANSFORMS
from torch.utils.data import DataLoader

from mmspectral.compat.checkpoint_damage import find_damage
from mmspectral.compat.checkpoints import SAFE_GLOBALS
from mmspectral.engine import launch_run, runtime_notes
from mmspectral.engine.hooks.exact_resume import EpochSeedHook, seed_worker
from mmspectral.errors import UsageError
from tests.helpers import CONFIGS, DATA, TINY, TOY, log_lines

CONFIG = DATA / "toy_faults" / "config.py"
# Events of toy_faults.py: the writing of a checkpoint begins (os.chmod), it is complete but unnamed (os.rename), the
# oldest one is about to be deleted (os.remove).
MOMENTS = ["step", "evaluation", "os.chmod", "os.rename", "os.remove"]
DEATHS = [("step", 2), ("step", 6), *((moment, 1) for moment in MOMENTS[1:]), ("last evaluation", 2)]


@pytest.fixture(scope="module")
def toys():
    """The modules beside the config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CONFIG.parent)
        yield SimpleNamespace(faults=import_module("toy_faults"), same_run=import_module("same_run").assert_same_run)


@pytest.fixture(scope="module")
def train(toys):
    """Return a function that trains the toy, or another config, and returns the exit status and what it printed."""

    def run(work_dir, *arguments, config=CONFIG, **moments):
        return toys.faults.run_tool("train.py", config, "--work-dir", work_dir, *arguments, **moments)

    return run


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
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(toys, train, straight, tmp_path, deaths):
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
    toys.same_run(straight, tmp_path, "epoch_4.pth")
    assert not any("started" in name for line in log_lines(tmp_path) for name in line), "only metrics are logged"
    assert checkpoints(tmp_path) == checkpoints(straight), "none was left over or lost"
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.slow
@pytest.mark.fault
def test_training_meets_a_full_disk_and_another_architecture(train, tmp_path):
    """The first save fails, by option training goes on; then the config changes. A checkpoint has more than 300 kB."""
    work_dir = tmp_path / "run"
    status, log = train(work_dir, largest_file=100_000)
    assert status == 1 and "epoch_1.pth" in log and "could not be written: File too large" in log
    assert not list(work_dir.glob("*.pth")) and not list(work_dir.glob(".*.tmp"))
    options = [f"default_hooks.checkpoint.{option}" for option in ("tolerated_failures=9", "save_best=None")]
    status, log = train(work_dir, "--cfg-options", *options, largest_file=100_000)
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.fault
def test_killed_twenty_times_at_random(toys, train, straight, tmp_path):
    """One run after the other is killed until it ends by itself, at moments of which a third is any time."""
    draw = random.Random(0)
    kills, finished, status = 0, 0, None
    while kills < 20 or status == -9:
        work_dir = tmp_path / str(finished)
        before = whole(work_dir)
        moment = draw.choice([*MOMENTS, None, None])
        how = dict(seconds=draw.uniform(5, 15)) if moment is None else dict(death=(moment, draw.randint(1, 3)))
        status, log = train(work_dir, "--resume", **(how if kills < 20 else {}))
        assert status in (0, -9), log
        assert not before or whole(work_dir), how
        if status == -9:
            kills += 1
        if status == 0:
            toys.same_run(straight, work_dir, "epoch_4.pth")
            assert checkpoints(work_dir) == checkpoints(straight)
            finished += 1


ITERATIONS = f"""
_base_ = {str(CONFIG)!r}
train_cfg = dict(_delete_=True, by_epoch=False, max_iters=8, val_interval=8)
param_scheduler = dict(_delete_=True, type="ConstantLR", factor=1.0, by_epoch=False)
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=2))
train_dataloader = dict(sampler=dict(_delete_=True, type="SAMPLER", shuffle=True))
custom_hooks = [dict(type="NoteSamples"), dict(type="Doom")]
"""


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["DefaultSampler", "InfiniteSampler"])
@pytest.mark.fault
def test_a_killed_iteration_based_run_repeats_no_data(train, tmp_path, sampler):
    """Two passes over 16 samples; killed in the sixth iteration, after the checkpoint of the fourth."""
    config, straight, resumed = (tmp_path / name for name in ("iterations.py", "straight", "resumed"))
    config.write_text(ITERATIONS.replace("SAMPLER", sampler))
    assert train(straight, config=config)[0] == 0
    assert train(resumed, config=config, death=("step", 6))[0] == -9
    status, log = train(resumed, "--resume", config=config)
    assert status == 0, log
    seen, again = (
        [json.loads(line) for line in (folder / "samples.json").read_text().splitlines()]
        for folder in (straight, resumed)
    )
    assert [iteration for iteration, _ in again] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert again[:6] == seen[:6] and again[6:] == seen[4:]
    assert sorted(sum((samples for _, samples in seen[4:]), [])) == list(range(16)), "the second pass"


# The hooks of each besides the one that kills. An epoch is three iterations: w is redrawn inside epochs and between.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.fault
@pytest.mark.parametrize(
    ("base", "hooks"),
    [
        ("quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py", []),
        (
            "dark/mask-rcnn_dark-vit-d128-p8_fpn_shapes.py",
            [dict(type="mmspectral.FeatureRedrawHook", interval=2)],
        ),
    ],
)
def test_a_killed_and_resumed_detector_equals_an_uninterrupted_one(toys, train, tmp_path, base, hooks):
    """Killed in the first save, in the first validation, and in the last of three epochs."""
    config, straight, resumed = (tmp_path / name for name in ("killed.py", "straight", "resumed"))
    config.write_text(
        f"_base_ = {str(CONFIGS / base)!r}\n"
        "custom_imports = dict(imports=['toy_faults'])\n"
        f"custom_hooks = {[dict(type='mmengine.Doom'), *hooks]}\n"
        "default_hooks = dict(logger=dict(interval=1))\n"
        "randomness = dict(deterministic=True)\n"
    )
    options = ["--cfg-options", *TINY, "train_cfg.max_epochs=3", "train_dataloader.num_workers=1"]
    train = functools.partial(train, config=config, seconds=900)
    status, log = train(straight, *options)
    assert status == 0, log
    for death, saved in ((("os.rename", 1), []), (("evaluation", 1), [1]), (("step", 5), [1, 2])):
        status, log = train(resumed, "--resume", *options, death=death)
        assert status == -9, log
        assert checkpoints(resumed) == [f"epoch_{number}.pth" for number in saved]
    status, log = train(resumed, "--resume", *options)
    assert status == 0, log
    weights = torch.load(straight / "epoch_3.pth", weights_only=False)["state_dict"]
    assert all(counter == 4 for name, counter in weights.items() if name.endswith("kernel.redraws"))
    toys.same_run(straight, resumed, "epoch_3.pth")


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


def test_a_checkpoint_needs_no_code_and_resumes(classifier, make_runner, images, safe_loading):
    """With every hook of ours."""
    hooks = [
        dict(type="mmspectral.CorrectionRefreshHook"),
        dict(type="mmspectral.ConditioningHook", interval=1),
        dict(type="mmspectral.NonFiniteGuardHook"),
        dict(type="EMAHook", momentum=0.3),
        # The fixture saves within epochs, where mmengine begins them again.
        dict(type="CheckpointHook", interval=1),
    ]

    def runner(resume_from=None):
        model = classifier(dict(type="SVDCorrection", interval=3))
        wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), 0.01))
        return make_runner(model, images(2), hooks, wrapper, epochs=2, resume_from=resume_from)

    whole = runner()
    whole.train()
    assert whole.iter == 4
    path = f"{whole.work_dir}/epoch_1.pth"
    with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
        checkpoint = torch.load(path, weights_only=True)
    assert "backbone.xca_layers.0.attn.qkv.correction" in checkpoint["state_dict"]
    assert checkpoint["message_hub"]["log_scalars"]["train/loss"].current() > 0

    resumed = runner(resume_from=path)
    resumed.train()
    assert resumed.iter == 4
    with open(f"{resumed.log_dir}/vis_data/scalars.json") as log:
        assert [line["step"] for line in map(json.loads, log) if "loss" in line] == [3, 4]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert not torch.equal(resumed.model.head.weight, checkpoint["state_dict"]["head.weight"])


@MMPRETRAIN_TRANSFORMS.register_module()
class MixWithEarlier:
    """Average an image with the one before it, as mmdet's CachedMixUp mixes it with earlier ones."""

    def __init__(self):
        self.results_cache = []

    def __call__(self, results):
        self.results_cache.append(results["img"])
        return dict(results, img=np.mean(self.results_cache[-2:], 0).astype(np.uint8))


@pytest.mark.parametrize("left", ["gradients", "cache"])
def test_what_the_end_of_an_epoch_leaves_is_resumed(tmp_path, monkeypatch, left):
    monkeypatch.syspath_prepend(TOY)
    for folder, epochs, load_from in (("straight", 3, None), ("resumed", 3, "straight/epoch_2.pth")):
        cfg = Config.fromfile(TOY / "config.py")
        cfg.train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=9)
        cfg.default_hooks.checkpoint = dict(type="mmspectral.CheckpointHook", interval=1)
        if left == "gradients":
            cfg.optim_wrapper.accumulative_counts = 3  # an epoch has four iterations
        else:
            cfg.train_dataloader.dataset.pipeline.insert(0, dict(type="MixWithEarlier"))
        cfg.update(work_dir=str(tmp_path / folder), launcher="none", custom_hooks=[])
        cfg.update(load_from=load_from and str(tmp_path / load_from), resume=load_from is not None)
        launch_run(cfg, Runner.train)
    a, b = (torch.load(tmp_path / folder / "epoch_3.pth", weights_only=False) for folder in ("straight", "resumed"))
    for name, tensor in a["state_dict"].items():
        assert torch.equal(tensor, b["state_dict"][name]), name


def test_what_a_resumed_run_forgets_is_named():
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    runner = Mock(train_loop=Mock(spec=EpochBasedTrainLoop), train_dataloader=loader, iter=0)
    runner.hooks = [mmengine.hooks.EarlyStoppingHook("acc")]
    EpochSeedHook().before_train(runner)
    early, workers = (call.args[0] for call in runner.logger.warning.call_args_list)
    assert "EarlyStoppingHook" in early and "persistent_workers=False" in workers


@pytest.mark.fault
def test_an_interrupted_run_says_how_to_continue(train, tmp_path):
    status, output = train(tmp_path, death=("step", 2, "SIGINT"))
    assert status == 130 and "Traceback" not in output
    assert "--resume continues the run" in output.splitlines()[-1]


@pytest.fixture
def stop_early(count, tmp_path):
    """Return a function that trains one iteration per epoch and returns the number of epochs."""

    def run(scores, resume_from=None, **settings):
        return int(
            count(
                tmp_path / uuid.uuid4().hex if resume_from else tmp_path,
                scores,
                dict(type="mmspectral.CheckpointHook", interval=1, save_best="acc", rule="greater"),
                [
                    dict(type="mmspectral.EarlyStoppingHook", monitor="acc", **settings),
                    dict(type="mmspectral.DueValidationHook"),
                ],
                load_from=resume_from and str(tmp_path / f"epoch_{resume_from}.pth"),
                resume=resume_from is not None,
            ).model.updates
        )

    return run


@pytest.mark.parametrize(
    ("scores", "settings", "end"),
    [([1, 2, 2, 2, 3, 3], dict(patience=2), 4), ([1, 2, 3, 4], dict(patience=9, stopping_threshold=2.5), 3)],
    ids=["no better score", "threshold"],
)
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(stop_early, scores, settings, end):
    assert stop_early(scores, **settings) == end
    for epoch in range(1, end + 1):
        assert stop_early(scores, resume_from=epoch, **settings) == end, epoch
    if "stopping_threshold" not in settings:
        assert stop_early(scores, resume_from=end, patience=3) == 6, "other settings decide again"


@pytest.mark.parametrize("host", ["mmdet", "mmpretrain"])
def test_two_lines_turn_it_on_for_a_config_of_a_host(tmp_path, host):
    path = tmp_path / "child.py"
    bases = [f"{host}::_base_/default_runtime.py", "mmspectral::_base_/runtime.py"]
    path.write_text(f"_base_ = {bases}\ndefault_hooks = _base_.exact_resume\n")
    cfg = Config.fromfile(path)
    assert runtime_notes(cfg) == []
    checkpoint = cfg.default_hooks.checkpoint
    assert (checkpoint.type, checkpoint.interval) == ("mmspectral.CheckpointHook", 1)
    assert cfg.default_hooks.logger.type == "LoggerHook"


def test_a_config_without_it_is_told_in_one_line():
    stock = Config(dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook"))))
    (note,) = runtime_notes(stock)
    for part in ("exact resume, atomic checkpoints", "_base_/runtime.py", "EarlyStoppingHook", "persistent_workers"):
        assert part in note and "\n" not in note
    assert runtime_notes(Config()) == [note]
    assert runtime_notes(Config(dict(runner_type="FlexibleRunner"))) == []
    with pytest.raises(UsageError, match="fault_tolerance"):
        runtime_notes(Config(dict(fault_tolerance=False)))

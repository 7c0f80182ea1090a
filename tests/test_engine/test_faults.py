"""Damaged images, disks and folders, another architecture, and seeds: what a run says and what it leaves alone."""

import functools
import json
import random
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import worker_init_fn
from mmengine.registry import init_default_scope
from torch.utils.data import DataLoader

from mmspectral.datasets.image_loading import LoadImageFromFile, UnreadableImageError
from mmspectral.engine.hooks.epoch_seed import seed_worker
from mmspectral.engine.runner.config import UsageError
from mmspectral.engine.runner.fault_tolerance import HOOKS, IMAGE_LOADER, make_fault_tolerant, require_writable

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


@pytest.fixture
def picture(tmp_path):
    """Return a function that writes a picture of noise and returns its path."""

    def write(name):
        path = tmp_path / name
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        assert cv2.imwrite(str(path), noise)
        return path

    return write


@pytest.mark.slow
def test_training_meets_a_full_disk_and_another_architecture(train, tmp_path):
    """The first save fails, by option training goes on; then the config changes. A checkpoint has more than 300 kB."""
    work_dir = tmp_path / "run"
    status, log = train(work_dir, largest_file=100_000)
    assert status == 1 and "epoch_1.pth" in log and "could not be written: File too large" in log
    assert not list(work_dir.glob("*.pth")) and not list(work_dir.glob(".*.tmp"))
    option = ["--cfg-options", "fault_tolerance.tolerated_failures=9", "default_hooks.checkpoint.save_best=None"]
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


def test_a_file_in_the_place_of_the_work_folder(tmp_path):
    (tmp_path / "work").write_text("mine")
    for folder in (tmp_path / "work", tmp_path / "work" / "below"):
        with pytest.raises(UsageError, match=r"work.* cannot be written.*--work-dir"):
            require_writable(str(folder))
    assert (tmp_path / "work").read_text() == "mine"
    require_writable(str(tmp_path / "new" / "work"))
    assert (tmp_path / "new" / "work").is_dir() and not list((tmp_path / "new" / "work").iterdir())


@pytest.mark.parametrize("name", ["picture.jpg", "picture.png", "picture.bmp"])
def test_whole_images_are_read_as_by_mmcv(picture, name):
    path = picture(name)
    results = LoadImageFromFile().transform(dict(img_path=str(path)))
    np.testing.assert_array_equal(results["img"], cv2.imread(str(path)))
    path.write_bytes(path.read_bytes() + bytes(100))
    np.testing.assert_array_equal(LoadImageFromFile()(dict(img_path=str(path)))["img"], results["img"])


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("picture.jpg", 2000, "cut short: its 2000 bytes have no end mark"),
        ("picture.png", 2000, "cut short"),
        ("picture.jpg", 0, "cannot be read"),
        ("picture.bmp", 30, "cannot be read"),
        ("picture.jpg", None, "No such file"),
    ],
)
def test_unreadable_images_are_named(picture, name, size, reason):
    path = picture(name)
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnreadableImageError, match=rf"{name}.*{reason}.*skip_unreadable=True"):
        LoadImageFromFile().transform(dict(img_path=str(path)))


def test_opencv_reads_a_truncated_jpeg_without_an_error(picture):
    """The reason for looking at the end of the file."""
    path = picture("picture.jpg")
    expected = cv2.imread(str(path))
    path.write_bytes(path.read_bytes()[:2000])
    assert cv2.imread(str(path)).shape == expected.shape
    assert not np.array_equal(cv2.imread(str(path)), expected)


def test_unreadable_images_are_skipped_and_counted(picture):
    """In a data set, another image takes their place."""
    from mmpretrain.datasets import CustomDataset

    good = picture("good.png")
    for name in ("first.jpg", "second.jpg"):
        path = picture(name)
        path.write_bytes(path.read_bytes()[:2000])
    annotations = good.with_name("annotations.txt")
    annotations.write_text("first.jpg 0\ngood.png 1\nsecond.jpg 0\n")
    init_default_scope("mmpretrain")
    pipeline = [dict(type=IMAGE_LOADER, skip_unreadable=True), dict(type="PackInputs")]
    data = CustomDataset(ann_file=str(annotations), data_prefix=str(good.parent), pipeline=pipeline)
    loader = data.pipeline.transforms[0]
    assert [int(data[index]["data_samples"].gt_label) for index in range(3)] == [1, 1, 1]
    assert loader.skipped >= 2


def test_default_parts_and_their_switches():
    pipeline = [dict(type="LoadImageFromFile", backend_args=None), dict(type="Resize")]
    data = dict(type="RepeatDataset", dataset=dict(type="CocoDataset", pipeline=pipeline))
    settings = dict(
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=3), logger=dict(type="LoggerHook")),
        custom_hooks=[dict(type="EMAHook"), dict(type="mmspectral.EpochSeedHook")],
        train_dataloader=dict(persistent_workers=True, dataset=data),
        val_dataloader=dict(persistent_workers=True, dataset=dict(pipeline=pipeline)),
    )
    cfg = Config(settings)
    make_fault_tolerant(cfg)
    assert cfg.default_hooks.checkpoint == dict(type="mmspectral.CheckpointHook", interval=3)
    assert cfg.default_hooks.logger == dict(type="LoggerHook")
    assert [hook.type for hook in cfg.custom_hooks] == ["EMAHook", "mmspectral.EpochSeedHook", HOOKS[0], HOOKS[2]]
    assert cfg.train_dataloader.persistent_workers is False and cfg.val_dataloader.persistent_workers is True
    assert cfg.train_dataloader.dataset.dataset.pipeline[0] == dict(type=IMAGE_LOADER, backend_args=None)
    assert cfg.val_dataloader == settings["val_dataloader"]
    once = cfg.to_dict()
    make_fault_tolerant(cfg)
    assert cfg.to_dict() == once == Config.fromstring(cfg.pretty_text, ".py").to_dict()

    off = Config(dict(settings, fault_tolerance=False))
    make_fault_tolerant(off)
    assert off.to_dict() == dict(settings, fault_tolerance=False)

    tuned = Config(dict(settings, fault_tolerance=dict(tolerated_failures=2, skip_unreadable=True)))
    make_fault_tolerant(tuned)
    assert tuned.default_hooks.checkpoint.tolerated_failures == 2
    assert tuned.train_dataloader.dataset.dataset.pipeline[0].skip_unreadable is True

    own = dict(default_hooks=dict(checkpoint=dict(type="mmengine.CheckpointHook")))
    kept = Config(own)
    make_fault_tolerant(kept)
    assert kept.default_hooks == own["default_hooks"]
    bare = Config(dict())
    make_fault_tolerant(bare)
    assert bare.default_hooks.checkpoint == dict(type="mmspectral.CheckpointHook")
    for wrong in (dict(tolerated=1), "yes"):
        with pytest.raises(UsageError, match="fault_tolerance"):
            make_fault_tolerant(Config(dict(fault_tolerance=wrong)))


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

"""The embedded shapes set: the same everywhere, sound annotations, and safe writing."""

import functools
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.registry import DATASETS
from mmengine.evaluator import Evaluator
from mmengine.registry import DefaultScope
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO

from mmspectral.datasets import ShapesDataset, shapes
from mmspectral.datasets.shapes_render import render


def annotation_file(split, **settings):
    """Write a set where it is absent."""
    return ShapesDataset(split=split, **settings).ann_file


@pytest.fixture(scope="module")
def default_root(tmp_path_factory):
    """A folder with both default sets."""
    root = tmp_path_factory.mktemp("shapes")
    for split in ("train", "val"):
        annotation_file(split, data_root=str(root))
    return root


@pytest.fixture(scope="module", params=["train", "val"])
def coco(request, default_root):
    return COCO(annotation_file(request.param, data_root=str(default_root)))


def _build(**settings):
    with DefaultScope.overwrite_default_scope("mmdet"):
        return DATASETS.build(dict(type="mmspectral.ShapesDataset", **settings))


def _folder(file):
    return Path(file).parents[1]


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _process(function):
    """Start ``function`` in a copy of this process."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


@pytest.mark.parametrize("split", ["train", "val"])
def test_default_sets_have_the_published_content_and_are_not_drawn_again(default_root, split, monkeypatch):
    monkeypatch.setattr(shapes, "render", lambda *_: pytest.fail("drawn again"))
    folder = _folder(annotation_file(split, data_root=str(default_root)))
    assert json.loads((folder / "manifest.json").read_text())["sha256"] == shapes._EXPECTED[split]


def test_other_content_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "render", lambda *_: (np.zeros((160, 160, 3), np.uint8), []))
    with pytest.raises(RuntimeError, match=r"content hash .* pass seed=1"):
        annotation_file("val", data_root=str(tmp_path))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_images_depend_on_seed_split_and_index():
    image, _ = render(0, 0, 3, 160)
    assert not any(np.array_equal(image, render(*other, 160)[0]) for other in ((1, 0, 3), (0, 1, 3), (0, 0, 4)))


def test_masks_are_the_visible_pixels(coco):
    for image_id in coco.getImgIds():
        covered = np.zeros((160, 160), dtype=int)
        for annotation in coco.loadAnns(coco.getAnnIds(imgIds=[image_id])):
            rle = coco.annToRLE(annotation)
            assert mask_utils.area(rle) == annotation["area"]
            assert mask_utils.toBbox(rle).tolist() == annotation["bbox"]
            covered += mask_utils.decode(rle)
        assert covered.max() <= 1


def test_masks_lie_on_the_painted_shapes():
    """A shape has one colour up to the noise, so a mask that leaves it would show two."""
    for index in range(20):
        image, annotations = render(0, 1, index, 160)
        for annotation in annotations:
            if annotation["iscrowd"]:
                continue
            rle = mask_utils.merge(mask_utils.frPyObjects(annotation["segmentation"], 160, 160))
            colours = image[mask_utils.decode(rle).astype(bool)].astype(int)
            # Noise of +-12 about one colour; clipping at 255 only narrows it.
            assert np.ptp(colours, axis=0).max() <= 24


def test_ground_truth_as_detections_scores_one(default_root):
    dataset = _build(split="val", data_root=str(default_root), test_mode=True)
    coco = COCO(dataset.ann_file)
    with DefaultScope.overwrite_default_scope("mmdet"):
        evaluator = Evaluator(dict(type="mmspectral.CocoMetric"))
    evaluator.dataset_meta = dataset.metainfo
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        found = [instance for instance in info["instances"] if not instance["ignore_flag"]]
        ids = coco.getAnnIds(imgIds=[info["img_id"]], iscrowd=False)
        instances = {
            "bboxes": torch.tensor([instance["bbox"] for instance in found]).reshape(-1, 4),
            "scores": torch.ones(len(found)),
            "labels": torch.tensor([instance["bbox_label"] for instance in found], dtype=torch.long),
            "masks": [coco.annToRLE(annotation) for annotation in coco.loadAnns(ids)],
        }
        sample = {"img_id": info["img_id"], "ori_shape": (160, 160), "pred_instances": instances}
        evaluator.process([sample])
    scores = evaluator.evaluate(len(dataset))
    for metric in ("bbox", "segm"):
        assert [scores[f"coco/{metric}_mAP{suffix}"] for suffix in ("", "_s", "_m", "_l")] == [1, 1, 1, 1]


def test_builds_for_training_under_mmdets_scope(default_root):
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
        dict(type="PackDetInputs"),
    ]
    filter_cfg = dict(filter_empty_gt=True, min_size=32)
    dataset = _build(split="val", data_root=str(default_root), pipeline=pipeline, filter_cfg=filter_cfg)
    assert len(dataset) == 96
    assert "ann_file" not in dataset.metainfo
    sample = dataset[7]
    assert sample["inputs"].shape == (3, 160, 160)
    # The pipeline loads BGR, the renderer draws RGB.
    assert np.array_equal(sample["inputs"].flip(0).permute(1, 2, 0).numpy(), render(0, 1, 7, 160)[0])
    assert len(sample["data_samples"].ignored_instances) == 1
    assert len(sample["data_samples"].gt_instances.masks) == len(sample["data_samples"].gt_instances) > 0


def test_lazy_building_writes_nothing_before_it_is_used(tmp_path):
    dataset = _build(split="val", num_images=2, data_root=str(tmp_path), lazy_init=True)
    assert dataset.metainfo["classes"] == ("circle", "square", "triangle", "star")
    assert list(tmp_path.iterdir()) == []
    dataset.full_init()
    assert len(dataset) == 2
    assert Path(dataset.get_data_info(0)["img_path"]).is_file()


def test_the_environment_and_every_setting_choose_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPECTRAL_DATA", str(tmp_path / "a"))
    assert Path(annotation_file("val", num_images=1)).is_relative_to(tmp_path / "a")
    monkeypatch.delenv("MMSPECTRAL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    settings = ({}, dict(num_images=2), dict(image_size=64), dict(seed=1), dict(split="train"))
    files = {annotation_file(**{**dict(split="val", num_images=1), **changed}) for changed in settings}
    assert len(files) == len(settings)
    assert all(Path(file).is_relative_to(tmp_path / "b" / "mmspectral") for file in files)


def test_two_processes_write_one_set(tmp_path, monkeypatch):
    write, barrier = shapes._write, multiprocessing.get_context("fork").Barrier(2)

    def counted(*arguments):
        (tmp_path / str(os.getpid())).touch()
        write(*arguments)

    def provide():
        barrier.wait()
        annotation_file("train", num_images=40, data_root=str(tmp_path))

    monkeypatch.setattr(shapes, "_write", counted)
    processes = [_process(provide) for _ in range(2)]
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    # Whoever came second waited and used what the first had drawn.
    assert sum((tmp_path / str(process.pid)).exists() for process in processes) == 1
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert folder.name == "shapes-v1-train40-160px-seed0" and len(list((folder / "train2017").iterdir())) == 40


def test_a_killed_writer_leaves_nothing_that_is_served(tmp_path, monkeypatch):
    settings = dict(split="train", num_images=10, data_root=str(tmp_path))
    with monkeypatch.context() as killed:
        killed.setattr(
            shapes, "render", lambda *key: render(*key) if key[2] < 5 else os.kill(os.getpid(), signal.SIGKILL)
        )
        process = _process(functools.partial(ShapesDataset, **settings))
        process.join(200)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["shapes-v1-train10-160px-seed0.partial"]
    assert len(ShapesDataset(**settings)) == 10
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["shapes-v1-train10-160px-seed0"]


DAMAGES = {
    "an image is gone": ("val2017/000000000001.png", None),
    "an image is cut": ("val2017/000000000001.png", lambda content: content[:-100]),
    "annotations differ": (
        "annotations/instances_val2017.json",
        lambda content: content.replace(b'"iscrowd":0', b'"iscrowd":1'),
    ),
    "no manifest": ("manifest.json", None),
    "an empty manifest": ("manifest.json", lambda content: b"{}"),
}


@pytest.mark.parametrize(("name", "change"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_set_is_drawn_again(tmp_path, name, change):
    settings = {"split": "val", "num_images": 3, "data_root": str(tmp_path)}
    folder = _folder(annotation_file(**settings))
    intact = _files(folder)
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change(intact[name]))
    assert _files(folder) != intact
    annotation_file(**settings)
    assert _files(folder) == intact
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.*MMSPECTRAL_DATA"):
        annotation_file("val", num_images=1, data_root=str(tmp_path / "file"))


@pytest.mark.parametrize("settings", [dict(split="test"), dict(num_images=0), dict(image_size=32), dict(seed=-1)])
def test_wrong_settings_are_named(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be .*, got {settings[name]!r}"):
        ShapesDataset(**settings)


@pytest.mark.parametrize("cue", [True, False])
def test_colour_tells_the_class_with_the_cue_only(cue):
    """The class of the nearest colour in the first half of the shapes is that of one in the second half."""
    colours, labels = [], []
    for index in range(120):
        image, annotations = render(0, 0, index, 160, cue)
        for annotation in annotations:
            if not annotation["iscrowd"]:
                mask = mask_utils.decode(mask_utils.merge(mask_utils.frPyObjects(annotation["segmentation"], 160, 160)))
                colours.append(np.median(image[mask.astype(bool)], axis=0))
                labels.append(annotation["category_id"])
    colours, labels = np.array(colours), np.array(labels)
    half = len(labels) // 2
    distances = np.linalg.norm(colours[half:, None] - colours[None, :half], axis=-1)
    right = (labels[:half][distances.argmin(1)] == labels[half:]).mean()
    assert right > 0.9 if cue else 0.15 < right < 0.35


def test_without_the_cue_the_set_has_its_own_folder_and_the_same_layout(tmp_path):
    settings = dict(split="val", num_images=3, data_root=str(tmp_path))
    folders = [Path(_build(**settings, colour_cue=cue).ann_file).parents[1] for cue in (True, False)]
    assert folders[0] != folders[1] == folders[0].with_name(f"{folders[0].name}-no-colour-cue")

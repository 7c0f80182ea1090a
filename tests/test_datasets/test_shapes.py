"""The embedded shapes set: the same everywhere, sound annotations, and safe writing."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.registry import DATASETS
from mmengine.evaluator import Evaluator
from mmengine.registry import DefaultScope
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO

from mmspectral.datasets import ShapesDataset, shapes, shapes_annotation_file
from mmspectral.datasets.shapes_render import render
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def default_root(tmp_path_factory):
    """A folder with both default sets."""
    root = tmp_path_factory.mktemp("shapes")
    for split in ("train", "val"):
        shapes_annotation_file(split, data_root=str(root))
    return root


@pytest.fixture(scope="module", params=["train", "val"])
def coco(request, default_root):
    return COCO(shapes_annotation_file(request.param, data_root=str(default_root)))


def _build(**settings):
    with DefaultScope.overwrite_default_scope("mmdet"):
        return DATASETS.build(dict(type="mmspectral.ShapesDataset", **settings))


def _folder(annotation_file):
    return Path(annotation_file).parents[1]


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _run(code):
    """Start Python on ``code`` in the repository, with the module as ``shapes``."""
    command = [sys.executable, "-c", f"import mmspectral.datasets.shapes as shapes\n{code}"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.mark.parametrize("split", ["train", "val"])
def test_default_sets_have_the_published_content(default_root, split):
    folder = _folder(shapes_annotation_file(split, data_root=str(default_root)))
    assert json.loads((folder / "manifest.json").read_text())["sha256"] == shapes._EXPECTED[split]


def test_other_content_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "render", lambda *_: (np.zeros((160, 160, 3), np.uint8), []))
    with pytest.raises(RuntimeError, match=r"content hash .* pass seed=1"):
        shapes_annotation_file("val", data_root=str(tmp_path))
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


def test_the_set_has_what_a_detector_meets(coco):
    annotations = list(coco.anns.values())
    areas = np.array([annotation["area"] for annotation in annotations if not annotation["iscrowd"]])
    small, large = (areas < 32**2).mean(), (areas > 96**2).mean()
    assert 0.2 < small < 0.6
    assert large > 0.02
    assert 1 - small - large > 0.3
    assert sum(annotation["iscrowd"] for annotation in annotations) == len(coco.imgs) // 10
    assert sum(not coco.getAnnIds(imgIds=[image_id]) for image_id in coco.imgs) == len(coco.imgs) // 25
    labels = [annotation["category_id"] for annotation in annotations]
    assert min(labels.count(category) for category in coco.getCatIds()) > 0.15 * len(labels)
    pieces = [len(annotation["segmentation"]) for annotation in annotations if not annotation["iscrowd"]]
    assert np.mean(np.array(pieces) > 1) > 0.03


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


def test_the_environment_chooses_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPECTRAL_DATA", str(tmp_path / "a"))
    assert Path(shapes_annotation_file("val", num_images=1)).is_relative_to(tmp_path / "a")
    monkeypatch.delenv("MMSPECTRAL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert Path(shapes_annotation_file("val", num_images=1)).is_relative_to(tmp_path / "b" / "mmspectral")


def test_every_setting_has_its_own_folder(tmp_path):
    settings = [{}, {"num_images": 2}, {"image_size": 64}, {"seed": 1}, {"split": "train"}]
    defaults = {"split": "val", "num_images": 1, "data_root": str(tmp_path)}
    assert len({shapes_annotation_file(**{**defaults, **setting}) for setting in settings}) == len(settings)


def test_two_processes_write_one_set(tmp_path):
    code = f"""
print('ready', flush=True)
input()
shapes.shapes_annotation_file('train', num_images=40, data_root={str(tmp_path)!r})
"""
    processes = [_run(code) for _ in range(2)]
    for process in processes:
        # Imports take different times, so both start to write on a word from here.
        assert any(line == "ready\n" for line in process.stdout)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    # Whoever came second waited and used what the first had drawn.
    assert sum(output.count("Drawing 40 images") for output in outputs) == 1
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [folder.name for folder in folders] == ["shapes-v1-train40-160px-seed0"]
    assert len(list((folders[0] / "train2017").iterdir())) == 40


def test_a_killed_writer_leaves_nothing_that_is_served(tmp_path):
    code = f"""
import os, signal
draw = shapes.render
shapes.render = lambda *key: draw(*key) if key[2] < 5 else os.kill(os.getpid(), signal.SIGKILL)
shapes.shapes_annotation_file('train', num_images=10, data_root={str(tmp_path)!r})
"""
    process = _run(code)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL, output
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["shapes-v1-train10-160px-seed0.partial"]

    dataset = ShapesDataset(split="train", num_images=10, data_root=str(tmp_path))
    assert len(dataset) == 10
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
    folder = _folder(shapes_annotation_file(**settings))
    intact = _files(folder)
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change(intact[name]))
    assert _files(folder) != intact
    shapes_annotation_file(**settings)
    assert _files(folder) == intact
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]


def test_an_intact_set_is_not_written_again(default_root, monkeypatch):
    monkeypatch.setattr(shapes, "render", lambda *_: pytest.fail("drawn again"))
    shapes_annotation_file("val", data_root=str(default_root))


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.*MMSPECTRAL_DATA"):
        shapes_annotation_file("val", num_images=1, data_root=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, "'train' and 'val'"),
        ({"num_images": 0}, "at least 1"),
        ({"image_size": 32}, "at least 64"),
        ({"seed": -1}, "positive"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
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

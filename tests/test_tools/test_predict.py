"""predict.py: COCO results that pycocotools reads, ids, pictures, and classifiers."""

import contextlib
import io
import json
from pathlib import Path

import cv2
import matplotlib
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from pycocotools.coco import COCO

from mmspectral.apis import find_images, predict
from mmspectral.apis.detection import COCO_CATEGORY_IDS, category_ids
from mmspectral.apis.prediction import image_ids
from mmspectral.datasets.check.coco import read_annotations
from mmspectral.errors import UsageError
from tests.helpers import QUICKSTART

CLASSES = ("disk", "square")

DETECTOR = f"""
_base_ = {str(QUICKSTART)!r}
heads = dict(bbox_head=dict(num_classes=2), mask_head=dict(num_classes=2))
model = dict(roi_head=heads, test_cfg=dict(rcnn=dict(score_thr=0.0, max_per_img=5)))
dataset = dict(_delete_=True, type="CocoDataset", ann_file="", metainfo=dict(classes={CLASSES}))
test_dataloader = dict(dataset=dict(dataset, pipeline={{{{_base_.test_pipeline}}}}))
"""


def write_images(folder, names):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        cv2.imwrite(str(folder / name), rng.integers(0, 255, (40, 60, 3), dtype=np.uint8))
    return folder


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A config file and an untrained checkpoint, whose detections all score about one third."""
    folder = tmp_path_factory.mktemp("detector")
    (folder / "config.py").write_text(DETECTOR)
    import mmdet.models  # noqa: F401
    from mmdet.registry import MODELS

    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope("mmdet"):
        model = MODELS.build(Config.fromfile(folder / "config.py").model)
    model.init_weights()
    meta = dict(dataset_meta=dict(classes=CLASSES))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / "named.pth")
    torch.save(model.state_dict(), folder / "unnamed.pth")
    return folder


def run_detector(detector, images, out, **settings):
    settings = dict(device="cpu", batch_size=2, score_thr=0.1) | settings
    checkpoint = str(detector / settings.pop("checkpoint", "named.pth"))
    with DefaultScope.overwrite_default_scope("mmdet"):
        return predict(Config.fromfile(detector / "config.py"), checkpoint, images, out, **settings)


@pytest.fixture(scope="module")
def predicted(detector, tmp_path_factory):
    images = write_images(tmp_path_factory.mktemp("images"), ["000000000139.jpg", "cat.png", "b/1.bmp"])
    (images / "broken.jpg").write_text("no image")
    (images / "empty.jpg").touch()
    out = tmp_path_factory.mktemp("out")
    found = find_images([str(images), str(images / "b" / "*")])
    return out, run_detector(detector, found, out)


def coco_results(out, name):
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(out / "images.json"))
        return coco, coco.loadRes(str(out / name))


def test_detections_are_coco_results(predicted):
    out, result = predicted
    coco, boxes = coco_results(out, "results.json")
    assert {image["file_name"]: image["id"] for image in coco.dataset["images"]} == {
        "000000000139.jpg": 139,
        "cat.png": 3,
        "b/1.bmp": 1,
    }
    assert coco.dataset["categories"] == [dict(id=1, name="disk"), dict(id=2, name="square")]
    assert [path.name for path in result.unreadable] == ["broken.jpg", "empty.jpg"]
    assert len(boxes.anns) == len(result.records) == 15
    for record in json.loads((out / "results.json").read_text()):
        x, y, width, height = record["bbox"]
        assert x >= 0 and x + width <= 60 and y >= 0 and y + height <= 40
        assert record["category_id"] in (1, 2)
        assert record["segmentation"]["size"] == [40, 60]
        assert 0 < record["score"] < 1
    coco, masks = coco_results(out, "results.segm.json")
    assert all(annotation["area"] == masks.annToMask(annotation).sum() for annotation in masks.anns.values())


def test_pictures_show_the_predictions(predicted, detector, tmp_path):
    out, result = predicted
    names = {path.relative_to(out / "vis").as_posix() for path in (out / "vis").rglob("*.*")}
    assert names == {"000000000139.jpg", "cat.png", "b/1.bmp.jpg"}
    image = result.unreadable[0].parent / "cat.png"
    original = cv2.imread(str(image))
    assert (cv2.imread(str(out / "vis" / "cat.png")) != original).any()
    run_detector(detector, [image], tmp_path, score_thr=0.99)
    if matplotlib.__version_info__ >= (3, 11):  # before, each step of mmengine's drawing moves the image by a pixel
        assert (cv2.imread(str(tmp_path / "vis" / "cat.png")) == original).all()
    run_detector(detector, [image], tmp_path / "none", pictures=False)
    assert not (tmp_path / "none" / "vis").exists()


def test_batches_do_not_change_the_detections(predicted, detector, tmp_path):
    _, result = predicted
    root = result.unreadable[0].parent
    single = run_detector(detector, [root / image["file_name"] for image in result.images], tmp_path, batch_size=1)
    for one, two in zip(single.records, result.records, strict=True):
        assert one["category_id"] == two["category_id"]
        assert one["bbox"] == pytest.approx(two["bbox"], abs=1e-2)
        assert one["score"] == pytest.approx(two["score"], abs=1e-4)


def test_ids_of_an_annotation_file_win(detector, predicted, tmp_path):
    images = predicted[1].unreadable[0].parent
    categories = [dict(id=7, name="square"), dict(id=5, name="disk")]
    ann_file = str(tmp_path / "ann.json")
    content = dict(images=[dict(id=900, file_name="x/cat.png")], categories=categories, annotations=[])
    Path(ann_file).write_text(json.dumps(content))
    result = run_detector(detector, [images / "cat.png"], tmp_path, ann_file=ann_file)
    assert {record["image_id"] for record in result.records} == {900}
    assert {record["category_id"] for record in result.records} <= {5, 7}
    assert json.loads((tmp_path / "images.json").read_text())["categories"] == categories[::-1]
    with pytest.raises(UsageError, match=r"139\.jpg is not in the annotation file"):
        run_detector(detector, [images / "000000000139.jpg"], tmp_path, ann_file=ann_file)


def test_checkpoint_without_class_names_takes_those_of_the_config(detector, predicted, tmp_path):
    images = predicted[1].unreadable[0].parent
    result = run_detector(detector, [images / "cat.png"], tmp_path, checkpoint="unnamed.pth", pictures=False)
    named = [record for record in predicted[1].records if record["image_id"] == 3]
    assert [record["category_id"] for record in result.records] == [record["category_id"] for record in named]
    categories = json.loads((tmp_path / "images.json").read_text())["categories"]
    assert [category["name"] for category in categories] == list(CLASSES)


def test_category_ids():
    from mmdet.datasets import CocoDataset

    coco = CocoDataset.METAINFO["classes"]
    ids, source = category_ids(coco)
    assert source == "COCO's own"
    by_name = dict(zip(coco, ids, strict=True))
    # As in instances_val2017.json.
    assert (by_name["person"], by_name["stop sign"], by_name["sink"], by_name["toothbrush"]) == (1, 13, 81, 90)
    assert len(set(COCO_CATEGORY_IDS)) == 80
    assert category_ids(coco[:2]) == ([1, 2], "counted from 1")
    with pytest.raises(UsageError, match="square"):
        category_ids(CLASSES, dict(categories=[dict(id=1, name="disk")]))


def test_image_ids_are_unique():
    names = ["a.jpg", "2.jpg", "02.jpg", "b.jpg", "1.jpg"]
    assert image_ids([Path(name) for name in names]) == [3, 2, 4, 5, 1]
    content = dict(images=[dict(id=1, file_name="x/a.jpg"), dict(id=2, file_name="y/a.jpg")])
    assert image_ids([Path("/data/y/a.jpg"), Path("/data/x/a.jpg")], content) == [2, 1]
    with pytest.raises(UsageError, match="not in the annotation file"):
        image_ids([Path("/data/z/a.jpg")], content)


@pytest.mark.parametrize("content", ["[1]", "no json", '{"images": []}', '{"images": {}, "categories": []}'])
def test_annotation_files_are_checked(tmp_path, content):
    (tmp_path / "ann.json").write_text(content)
    with pytest.raises(UsageError, match=r"ann\.json"):
        read_annotations(tmp_path / "ann.json")


@pytest.mark.parametrize("entry", [dict(id=1, file_name=None), dict(id=1), dict(file_name="a.jpg"), None])
def test_entries_of_annotation_files_are_checked(entry):
    with pytest.raises(UsageError, match="images must have an id and a file_name"):
        image_ids([Path("a.jpg")], dict(images=[entry], categories=[]))
    with pytest.raises(UsageError, match="categories must have an id and a name"):
        category_ids(CLASSES, dict(images=[], categories=[entry]))


def test_links_keep_their_names_and_threads_are_left_out(detector, tmp_path):
    real = write_images(tmp_path / "real", ["a.png"])
    links = write_images(tmp_path / "links", ["own.png"])
    (links / "a.png").symlink_to(real / "a.png")
    for name, size in (("thin.png", (300, 1)), ("wide.png", (2, 20_000))):
        assert cv2.imwrite(str(links / name), np.zeros(size, np.uint8))
    found = find_images([str(links), str(links / ".." / "links" / "*.png")])
    result = run_detector(detector, found, tmp_path / "out")
    assert [image["file_name"] for image in result.images] == ["a.png", "own.png"]
    assert [path.name for path in result.unreadable] == ["thin.png", "wide.png"]
    assert json.loads((tmp_path / "out" / "results.json").read_text())


def test_heads_for_other_classes_are_refused_with_both_shapes(detector, tmp_path):
    images = write_images(tmp_path / "images", ["a.png"])
    cfg = Config.fromfile(detector / "config.py")
    cfg.merge_from_dict({f"model.roi_head.{head}.num_classes": 3 for head in ("bbox_head", "mask_head")})
    with pytest.raises(UsageError, match=r"fc_cls.*\(3, \d+\) in the file, \(4, \d+\) in the model"):
        predict(cfg, str(detector / "named.pth"), [images / "a.png"], tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_images_are_found_once(tmp_path):
    write_images(tmp_path, ["b.JPG", "a.png", "sub/c.jpg"])
    (tmp_path / "notes.txt").touch()
    a, b, c = tmp_path / "a.png", tmp_path / "b.JPG", tmp_path / "sub" / "c.jpg"
    assert find_images([str(tmp_path)]) == [a, b]
    assert find_images([str(b), str(tmp_path), str(tmp_path / "**" / "*.jpg")]) == [b, a, c]
    with pytest.raises(UsageError, match=r"nothing\*"):
        find_images([str(tmp_path / "nothing*")])


@pytest.mark.parametrize("wrong", ["config", "checkpoint", "images", "--ann-file"])
def test_mistyped_paths_are_named_in_one_line(run_tool, toy_config, wrong, tmp_path):
    given = dict(config=toy_config, checkpoint=toy_config, images=toy_config) | {wrong: tmp_path / "mistyped"}
    options = ["--ann-file", given.pop("--ann-file")] if wrong.startswith("--") else []
    result = run_tool("predict.py", *given.values(), "-o", tmp_path / "out", *options)
    assert result.returncode == 2 and "mistyped" in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_command_classifies_and_reports_what_it_cannot_read(run_tool, toy_config, trained, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for name, level in dict(dark=40, bright=200).items():
        cv2.imwrite(str(images / f"{name}.jpg"), np.full((32, 32, 3), level, np.uint8))
    (images / "broken.jpg").write_text("no image")
    out = tmp_path / "out"
    result = run_tool("predict.py", toy_config, trained[0] / "iter_2.pth", images, "-o", out, "--batch-size", 4)
    assert result.returncode == 1
    assert "broken.jpg" in result.stderr.splitlines()[-1]
    records = json.loads((out / "results.json").read_text())
    assert [(r["file_name"], r["class_index"], r["class_name"]) for r in records] == [
        ("bright.jpg", 1, "bright"),
        ("dark.jpg", 0, "dark"),
    ]
    assert all(0.5 < record["score"] < 1 for record in records)
    assert {path.name for path in (out / "vis").iterdir()} == {"bright.jpg", "dark.jpg"}

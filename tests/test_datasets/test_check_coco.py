"""What the check says about COCO sets, and that mmdet does what the check says."""

import json
import os
from pathlib import Path

import numpy as np
import pycocotools.mask
import pytest
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from PIL import Image

from mmspectral.datasets import check_before_training, check_dataset
from mmspectral.datasets.check.coco import KEPT, mask_problem
from mmspectral.errors import UsageError
from tests.helpers import CONFIGS, ROOT

REAL = Path(os.environ.get("MMSPECTRAL_COCO", ROOT.parent / "shared" / "data" / "coco_permissive"))


def changed(content, part, index, **values):
    """Return ``content`` with values of one entry replaced; ``...`` takes the key away."""
    entry = content[part][index] | values
    content[part][index] = {key: value for key, value in entry.items() if value is not ...}
    return content


def test_a_valid_set_has_no_error_and_the_numbers_mmdet_has(coco_content, coco_config):
    cfg = coco_config(coco_content)
    report = check_dataset(cfg)
    assert report.all_errors == report.all_warnings == []
    (split,) = report.splits
    dataset = CocoDataset(**{k: v for k, v in cfg.train_dataloader.dataset.items() if k not in ("type", "pipeline")})
    objects = sum(not i["ignore_flag"] for index in range(len(dataset)) for i in dataset[index]["instances"])
    assert (
        (split.counts["images used"], split.counts["objects used"]) == (str(len(dataset)), str(objects)) == ("3", "4")
    )
    assert split.counts["category ids"] == "5..40 with gaps"
    assert split.counts["crowd regions"] == split.counts["masks as run lengths"] == "1"
    assert split.counts["large (AP_l)"] == "n/a"
    text = str(report)
    assert "| images used             | 3" in text and "n/a: without objects of that size" in text


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("annotations", dict(bbox=...), "1 annotations have no bbox of four finite numbers"),
        ("annotations", dict(bbox=[0, 0, float("nan"), 3]), "no bbox of four finite numbers"),
        ("annotations", dict(bbox=[0, 0, 10**400, 3]), "no bbox of four finite numbers"),
        ("annotations", dict(area=...), "have no area"),
        ("annotations", dict(area="12"), "have no area"),
        ("annotations", dict(id=2), "have the id of another one (such as 2)"),
        ("annotations", dict(id=10**30), "no id that is a whole number"),
        ("annotations", dict(image_id="1"), "no image_id that is a whole number"),
        *(("annotations", dict(iscrowd=value), "another iscrowd than 0 or 1") for value in (None, 0.5, "no", [], 2)),
        ("annotations", dict(ignore=0.5), "another ignore than 0 or 1"),
        ("annotations", dict(segmentation=[]), "objects have no segmentation"),
        ("annotations", dict(segmentation=[[0, 0, 1e8, 0, 1e8, 9]]), "further than ten times the size"),
        ("annotations", dict(segmentation=dict(size=[32.0, 40.0], counts=[1280])), "another size than"),
        ("annotations", dict(segmentation=[1, 2, 3, 4, 5, 6]), "no list of polygons"),
        ("annotations", dict(segmentation=dict(size=[9, 9], counts=[81])), "another size than"),
        ("annotations", dict(segmentation=dict(size=[32, 40], counts=[81])), "do not add up"),
        ("annotations", dict(segmentation=dict(size=[32, 40], counts="")), "do not add up"),
        ("annotations", dict(segmentation=dict(size=[32, 40], counts="zz")), "do not add up"),
        ("annotations", dict(segmentation=dict(size=[32, 40], counts="é")), "do not add up"),
        ("images", dict(id=2), "have the id of another one (such as 2)"),
        ("images", dict(id=None), "images have no id"),
        ("images", dict(height=32.0), "no height and width as whole numbers"),
        ("images", dict(height=10**6, width=10**6), "no height and width as whole numbers"),
        ("images", dict(height=20_000), "one side more than 200 times as long"),
        ("images", dict(height=40, width=32), "another size (width x height) than in the annotation file"),
        ("images", dict(file_name=7), "images have no file_name"),
        ("images", dict(height=0), "no height and width as whole numbers"),
        ("images", dict(file_name="nowhere.png"), "1 images have no file"),
        ("images", dict(file_name="nowhere/1.png"), "cannot be listed"),
        ("categories", dict(name="dog"), "id or name of another one"),
        ("categories", dict(name="tiger"), "1 of 3 classes are no category of the annotation file: 'cat'"),
        ("categories", dict(id=None), "categories are not dict(id=..., name=...)"),
    ],
)
def test_errors_are_short(coco_content, coco_config, part, values, message):
    report = check_dataset(coco_config(changed(coco_content, part, 0, **values)))
    assert any(message in text and len(text) < 300 for text in report.all_errors), report


@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (90, 61)])
def test_compressed_run_lengths_are_read_as_pycocotools_writes_them(shape):
    rng = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        mask = np.asfortranarray(rng.random(shape) < share, dtype=np.uint8)
        written = pycocotools.mask.encode(mask)
        written["counts"] = written["counts"].decode()
        assert mask_problem(written, *shape) == ("", KEPT)
        assert "do not add up" in mask_problem(dict(written, counts=written["counts"] + "1"), *shape)[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(bbox=[50.0, 4.0, 5.0, 5.0]), "left out: their box is outside the image"),
        (dict(bbox=[1.0, 4.0, 0.5, 5.0]), "left out: their box is less than a pixel"),
        (dict(area=0), "left out: their area is not positive"),
        (dict(image_id=99), "left out: their image_id is of no image"),
        (dict(category_id=99), "left out: their category_id is of no category"),
        (dict(ignore=1), "left out: they are marked `ignore`"),
        (dict(bbox=[30.0, 4.0, 16.0, 16.0]), "reach out of their image by more than a pixel"),
        (dict(segmentation=[[1.0, 1.0, 5.0, 5.0, 9.0, 9.0]]), "objects have polygons without area"),
        (dict(segmentation=[[1.0, 1.0, 5.0, 5.0], [1.0] * 7]), "so no mask"),
        (dict(segmentation=[[1.0, 1.0, 5.0, 5.0], [1.0, 1.0, 9.0, 1.0, 9.0, 9.0]]), "beside others"),
    ],
)
def test_warnings(coco_content, coco_config, values, message):
    report = check_dataset(coco_config(changed(coco_content, "annotations", 0, **values)))
    assert report.all_errors == []
    assert any(message in text and text.startswith("train: 1 ") for text in report.all_warnings), report
    left = 4 if any(kept in message for kept in ("reach out", "beside", "without area")) else 3
    assert report.splits[0].counts["objects used"] == str(left)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "cannot be read"),
        ("{", "cannot be read"),
        (None, "cannot be read"),
        ("[]", "no COCO annotation file"),
        ('{"images": 3, "categories": []}', "no list of images"),
        ('{"images": [], "annotations": [], "categories": []}', "0 of 0 images are left"),
    ],
)
def test_files_that_are_none(coco_config, content, message):
    cfg = coco_config(content or "")
    cfg.train_dataloader.dataset.ann_file += "" if content else ".gone"
    assert any(message in text for text in check_dataset(cfg).all_errors)


def test_a_set_that_is_empty_after_filtering_says_why(coco_content, coco_config):
    """mmdet#11650: such a run dies of 'need at least one array to concatenate'."""
    coco_content["annotations"] = []
    (error,) = check_dataset(coco_config(coco_content)).all_errors
    for fact in ("0 of 3 images are left", "3 have no annotation of a class", "0 are smaller than min_size=16"):
        assert fact in error
    with pytest.raises(UsageError, match="0 of 3 images are left"):
        check_before_training(coco_config(coco_content))


def test_a_set_without_any_mask_says_so(coco_content, coco_config):
    for annotation in coco_content["annotations"]:
        annotation["segmentation"] = []
    errors = "".join(check_dataset(coco_config(coco_content)).all_errors)
    assert "5 objects have no segmentation" in errors and "0 of 3 images have an object that can be used" in errors


def test_indices_and_small_images_are_counted_as_mmdet_does(coco_content, coco_config):
    changed(coco_content, "images", 1, height=8)
    cfg = coco_config(coco_content)
    cfg.train_dataloader.dataset.indices = [1]
    report = check_dataset(cfg)
    assert report.splits[0].counts["images used"] == "1"
    assert {Path(file).name for file in report.splits[0].files} == {"7.png"}
    assert "1 of 3 images are left" in "".join(report.all_warnings)


def test_classes_of_the_type_instead_of_the_file(coco_content, coco_config):
    """mmdet#10949: metainfo forgotten on the validation side."""
    cfg = coco_config(coco_content, coco_content)
    del cfg.val_dataloader.dataset["metainfo"]
    errors = check_dataset(cfg).all_errors
    assert any("val: " in text and "has no metainfo" in text and "'cat', 'dog', 'owl'" in text for text in errors)
    assert any("train and val have different classes" in text for text in errors)
    assert not any("num_classes" in text for text in errors), "the heads are right"


def test_classes_in_another_order_than_the_file(coco_content, coco_config):
    """mmdet numbers classes in the order of the file, whatever metainfo says."""
    cfg = coco_config(coco_content, classes=("owl", "cat", "dog"))
    settings = {k: v for k, v in cfg.train_dataloader.dataset.items() if k not in ("type", "pipeline")}
    dataset = CocoDataset(**settings)
    assert dataset.metainfo["classes"][dataset[1]["instances"][0]["bbox_label"]] == "dog"  # it is an owl
    (error,) = check_dataset(cfg).all_errors
    assert "another order" in error and "('cat', 'dog', 'owl')" in error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(metainfo=dict(classes=0)), "classes is 0; it must be a tuple of names"),
        (dict(metainfo=dict(classes="cat")), "classes is the string 'cat'"),
        (dict(ann_file=None), "ann_file is None; it must be a path"),
        (dict(data_prefix=dict(img_path="")), "data_prefix is {'img_path': ''}; it must be a dict of paths"),
        (dict(filter_cfg=1), "filter_cfg is 1; it must be a dict"),
        (dict(filter_cfg=dict(min_size=None)), "min_size is None; it must be a number of pixels"),
        (dict(filter_cfg=dict(min_size=10**400)), "it must be a number of pixels"),
        (dict(indices="all"), "indices is 'all'; it must be a number of images or their indices"),
    ],
)
def test_settings_of_another_kind(coco_content, coco_config, settings, message):
    cfg = coco_config(coco_content).to_dict()
    cfg["train_dataloader"]["dataset"].update(settings)
    error = check_dataset(Config(cfg)).all_errors[0]
    assert message in error


def test_heads_for_another_number_of_classes(coco_content, coco_config):
    errors = check_dataset(coco_config(coco_content, num_classes=40)).all_errors
    assert [text.partition(" ")[0] for text in errors] == [
        "model.roi_head.bbox_head.num_classes",
        "model.roi_head.mask_head.num_classes",
    ]
    assert "not the largest category id" in errors[0]


def test_train_images_in_the_validation_set(coco_content, coco_config, tmp_path):
    warnings = check_dataset(coco_config(coco_content, coco_content)).all_warnings
    assert any("3 images are in train and in val" in text for text in warnings)
    cfg = coco_config(coco_content, coco_content)
    (tmp_path / "copy").mkdir()
    for image in coco_content["images"]:
        source = Path(cfg.val_dataloader.dataset.data_prefix.img, image["file_name"])
        (tmp_path / "copy" / source.name).write_bytes(source.read_bytes())
    cfg.val_dataloader.dataset.data_prefix.img = str(tmp_path / "copy")
    assert any("3 images of train and val have the same name and size" in w for w in check_dataset(cfg).all_warnings)


def test_duplicate_file_names_and_wrapped_datasets(coco_content, coco_config):
    changed(coco_content, "images", 0, file_name="2.png")
    cfg = coco_config(coco_content)
    dataset = cfg.train_dataloader.dataset
    cfg.train_dataloader.dataset = dict(
        type="RepeatDataset", times=2, dataset=dict(type="ConcatDataset", datasets=[dataset, dict(dataset, indices=1)])
    )
    report = check_dataset(cfg)
    assert [split.name for split in report.splits] == ["train 1", "train 2"]
    assert any("have the file_name of another one (such as '2.png')" in text for text in report.all_warnings)


def test_the_switch_and_other_ranks_skip_the_check(coco_config, monkeypatch, capsys):
    cfg = coco_config("{")
    cfg.check_dataset = False
    check_before_training(cfg)
    cfg.check_dataset = True
    cfg.launcher = "pytorch"
    monkeypatch.setenv("RANK", "1")
    check_before_training(cfg)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="check_dataset=False skips this check"):
        check_before_training(cfg)


def test_data_on_another_machine_is_left_alone(coco_content, coco_config):
    cfg = coco_config(coco_content)
    cfg.train_dataloader.dataset.update(ann_file="s3://x/y.json", backend_args=dict(backend="petrel"))
    report = check_dataset(cfg)
    assert not report.all_errors and "not lie on this machine" in report.all_warnings[0]


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no COCO images at {REAL}; set MMSPECTRAL_COCO")
def test_real_coco_images():
    cfg = Config.fromfile(CONFIGS / "quickstart" / "mask-rcnn_spectral-xcit-d128-p8_fpn_coco.py")
    for split in ("train", "val", "test"):
        cfg[f"{split}_dataloader"].dataset.data_root = str(REAL)
    cfg.val_evaluator.ann_file = str(REAL / cfg.val_dataloader.dataset.ann_file)
    report = check_dataset(cfg)
    assert report.all_errors == report.all_warnings == []
    train, val = (split.counts for split in report.splits)
    assert (train["images used"], train["objects used"], train["crowd regions"]) == ("45", "492", "6")
    assert (val["images used"], val["objects used"], val["crowd regions"]) == ("47", "462", "7")


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_photos_that_their_exif_turns(coco_content, coco_config, tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for image in coco_content["images"]:
        Image.fromarray(np.zeros((32, 40, 3), np.uint8)).save(
            tmp_path / image["file_name"], "JPEG", exif=exif.tobytes()
        )
    cfg = coco_config(coco_content)
    cfg.train_dataloader.dataset.data_prefix.img = str(tmp_path)
    report = check_dataset(cfg)
    assert [("id 1: 32 x 40, turned by its EXIF orientation 6" in text) for text in report.all_errors] == [True] * (
        orientation == 6
    )
    assert len(report.all_warnings) == (orientation == 3)
    cfg.train_dataloader.dataset.pipeline[0].color_type = "unchanged"
    assert check_dataset(cfg).all_errors == check_dataset(cfg).all_warnings == []


@pytest.mark.parametrize("file_name", ["../1.png", "/1.png", "a/../../1.png"])
def test_a_file_name_that_leaves_the_folder_is_warned_of(coco_content, coco_config, file_name):
    report = check_dataset(coco_config(changed(coco_content, "images", 0, file_name=file_name)))
    assert any("leaves the folder" in text for text in report.all_warnings)


@pytest.mark.parametrize(
    ("values", "ours", "mmdets"),
    [
        (dict(id=0), "", "an id below 1"),
        (dict(iscrowd=...), "", "no iscrowd"),
        (dict(segmentation=...), *["no segmentation, and the evaluator scores masks (such as 1)"] * 2),
        (dict(segmentation=[[1, 1, 5, 5], [1, 1, 9, 1, 9, 9]]), *["beside others, and the evaluator"] * 2),
        (dict(category_id=99, segmentation=...), "", ""),
    ],
)
def test_what_the_evaluator_of_the_config_cannot_read(coco_content, coco_config, values, ours, mmdets):
    """Whether or not the pipeline loads masks."""
    content = changed(coco_content, "annotations", 0, **values)
    for evaluator, message in (("mmspectral.CocoMetric", ours), ("mmdet.CocoMetric", mmdets)):
        cfg = coco_config(content, content, evaluator=evaluator)
        cfg.val_dataloader.dataset.pipeline[1].with_mask = False
        found = check_dataset(cfg, ["val"]).all_errors
        assert len(found) == bool(message) and all(message in text for text in found), found


def test_objects_that_training_leaves_out_count_in_the_evaluation(coco_content, coco_config):
    content = changed(coco_content, "annotations", 0, ignore=1)
    warnings = check_dataset(coco_config(content, content, evaluator="mmspectral.CocoMetric"), ["val"]).all_warnings
    assert any("count in the evaluation" in text and "`ignore`" in text for text in warnings)


def test_an_evaluator_of_another_file(coco_content, coco_config, tmp_path):
    cfg = coco_config(coco_content, coco_content, evaluator="mmspectral.CocoMetric")
    cfg.val_evaluator.ann_file = str(tmp_path / "other.json")
    for images in (coco_content["images"], coco_content["images"][1:]):
        Path(cfg.val_evaluator.ann_file).write_text(json.dumps(dict(coco_content, images=images)))
        errors = check_dataset(cfg, ["val"]).all_errors
        assert ["1 images are not in the evaluator's" in text for text in errors] == [True] * (len(images) == 2)

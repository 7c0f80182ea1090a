"""Damaged, truncated and missing training images are named, or skipped and counted."""

import cv2
import numpy as np
import pytest
from mmengine.registry import init_default_scope

from mmspectral.datasets.image_loading import LoadImageFromFile, UnreadableImageError


@pytest.fixture
def picture(tmp_path):
    """Return a function that writes a picture of noise and returns its path."""

    def write(name):
        path = tmp_path / name
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        assert cv2.imwrite(str(path), noise)
        return path

    return write


@pytest.mark.parametrize("name", ["picture.jpg", "picture.png", "picture.bmp"])
def test_whole_images_are_read_as_by_mmcv(picture, name):
    path = picture(name)
    results = LoadImageFromFile().transform(dict(img_path=str(path)))
    np.testing.assert_array_equal(results["img"], cv2.imread(str(path)))
    path.write_bytes(path.read_bytes() + bytes(10_000))  # phones write a film behind the image
    np.testing.assert_array_equal(LoadImageFromFile()(dict(img_path=str(path)))["img"], results["img"])


@pytest.mark.parametrize(
    ("fault", "name", "size", "reason"),
    [
        ("truncated image", "picture.jpg", 2000, "cut short: its 2000 bytes have no end mark"),
        ("truncated image", "picture.png", 2000, "cut short"),
        ("damaged image", "picture.jpg", 0, "cannot be read"),
        ("damaged image", "picture.bmp", 30, "cannot be read"),
        ("missing image", "picture.jpg", None, "No such file"),
    ],
)
@pytest.mark.fault
def test_unreadable_images_are_named(picture, fault, name, size, reason):
    path = picture(name)
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnreadableImageError, match=rf"{name}.*{reason}.*skip_unreadable=True"):
        LoadImageFromFile().transform(dict(img_path=str(path)))


def test_other_stores_and_ignored_images_are_left_to_mmcv(picture, monkeypatch):
    content = picture("picture.jpg").read_bytes()
    monkeypatch.setattr("mmengine.fileio.get", lambda path, backend_args: content)
    assert LoadImageFromFile()(dict(img_path="s3://bucket/picture.jpg"))["img"].shape == (64, 64, 3)
    assert LoadImageFromFile(ignore_empty=True).transform(dict(img_path="absent.jpg")) is None


@pytest.mark.fault
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
    pipeline = [dict(type="mmspectral.LoadImageFromFile", skip_unreadable=True), dict(type="PackInputs")]
    data = CustomDataset(ann_file=str(annotations), data_prefix=str(good.parent), pipeline=pipeline)
    loader = data.pipeline.transforms[0]
    assert [int(data[index]["data_samples"].gt_label) for index in range(3)] == [1, 1, 1]
    assert loader.skipped >= 2

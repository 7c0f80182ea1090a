"""Damaged, truncated and missing training images are named, or skipped and counted."""

import cv2
import numpy as np
import pytest
from mmengine.registry import init_default_scope
from PIL import Image

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
        ("damaged image", "picture.jpg", 0, "cannot be used"),
        ("damaged image", "picture.bmp", 30, "cannot be used"),
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


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_size_is_that_of_the_annotations(tmp_path, orientation):
    """A photo that its EXIF turns does not lie under its boxes any more."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.jpg"
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(path, exif=exif.tobytes())
    for height, width, fits in ((40, 60, orientation == 1), (60, 40, orientation == 6)):
        results = dict(img_path=str(path), height=height, width=width)
        if fits:
            assert LoadImageFromFile()(results)["img"].shape[:2] == (height, width)
        else:
            with pytest.raises(UnreadableImageError, match=r"photo.*60 x 40|photo.*40 x 60"):
                LoadImageFromFile()(results)


@pytest.mark.parametrize("size", [(2, 401), (20_000, 80)])
def test_images_that_vanish_when_they_are_resized_are_named(tmp_path, size):
    path = tmp_path / "thread.png"
    assert cv2.imwrite(str(path), np.zeros(size, np.uint8))
    with pytest.raises(UnreadableImageError, match=r"thread\.png.*vanishes"):
        LoadImageFromFile()(dict(img_path=str(path)))
    assert LoadImageFromFile(skip_unreadable=True)(dict(img_path=str(path))) is None


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

"""A valid small COCO set with three classes, for tests to damage."""

import copy
import json

import cv2
import numpy as np
import pytest
from mmengine.config import Config

HEIGHT, WIDTH = 32, 40
CLASSES = ("cat", "dog", "owl")


def _annotation(number, image, category, **changes):
    square = [4.0, 4.0, 20.0, 4.0, 20.0, 20.0, 4.0, 20.0]
    return (
        dict(
            id=number,
            image_id=image,
            category_id=category,
            bbox=[4.0, 4.0, 16.0, 16.0],
            area=256.0,
            iscrowd=0,
            segmentation=[square],
        )
        | changes
    )


_CROWD = dict(iscrowd=1, segmentation=dict(size=[HEIGHT, WIDTH], counts=[200, 80, HEIGHT * WIDTH - 280]))
_CONTENT = dict(
    images=[dict(id=number, file_name=f"{number}.png", height=HEIGHT, width=WIDTH) for number in (1, 2, 7)],
    annotations=[
        _annotation(1, 1, 5),
        _annotation(2, 1, 9, bbox=[0.0, 0.0, 39.0, 31.0], area=1209.0),
        _annotation(3, 2, 40),
        _annotation(4, 7, 5, **_CROWD),
        _annotation(5, 7, 9),
    ],
    categories=[dict(id=number, name=name) for number, name in zip((5, 9, 40), CLASSES, strict=True)],
)


@pytest.fixture
def coco_content():
    """Contents of a valid annotation file."""
    return copy.deepcopy(_CONTENT)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """Folder with the images."""
    folder = tmp_path_factory.mktemp("images")
    for image in _CONTENT["images"]:
        assert cv2.imwrite(str(folder / image["file_name"]), np.full((HEIGHT, WIDTH, 3), image["id"], np.uint8))
    return folder


@pytest.fixture
def coco_config(tmp_path, image_folder):
    """Return a function from contents of annotation files to a config that trains on the first of them."""
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
        dict(type="mmdet.PackDetInputs"),
    ]

    def config(train, val=None, classes=CLASSES, num_classes=3, evaluator=None):
        loaders = {}
        for split, content in (("train", train), ("val", val)):
            if content is None:
                continue
            path = tmp_path / f"{split}.json"
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
            dataset = dict(
                type="CocoDataset",
                ann_file=str(path),
                data_prefix=dict(img=str(image_folder)),
                pipeline=pipeline,
                **(dict(metainfo=dict(classes=classes)) if classes else {}),
            )
            if split == "train":
                dataset["filter_cfg"] = dict(filter_empty_gt=True, min_size=16)
            else:
                dataset["test_mode"] = True
            loaders[f"{split}_dataloader"] = dict(dataset=dataset)
        if evaluator:
            loaders["val_evaluator"] = dict(
                type=evaluator, ann_file=str(tmp_path / "val.json"), metric=["bbox", "segm"]
            )
        heads = dict(bbox_head=dict(num_classes=num_classes), mask_head=dict(num_classes=num_classes))
        return Config(dict(default_scope="mmdet", model=dict(type="MaskRCNN", roi_head=heads), **loaders))

    return config

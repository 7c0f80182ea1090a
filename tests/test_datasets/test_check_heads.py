"""The heads of all hosts' models."""

import mmengine.hub
import pytest
from mmengine.config import Config

from mmspectral.configs_path import config_path
from mmspectral.datasets.check.check import check_heads, head_classes

EIGHTY = [f"class {index}" for index in range(80)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("detr/detr_r50_8xb2-150e_coco.py", {"model.bbox_head.num_classes": 80}),
        ("rpn/rpn_r50_fpn_1x_coco.py", {}),
        (
            "cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py",
            {f"model.roi_head.bbox_head[{i}].num_classes": 80 for i in range(3)}
            | {"model.roi_head.mask_head.num_classes": 80},
        ),
        (
            "mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py",
            {
                "model.panoptic_head.num_things_classes + num_stuff_classes": 133,
                "model.panoptic_head.loss_cls.class_weight (its length less one for the background)": 133,
                "model.panoptic_fusion_head.num_things_classes + num_stuff_classes": 133,
            },
        ),
    ],
)
def test_detectors_of_mmdet(name, expected):
    assert head_classes(mmengine.hub.get_config(f"mmdet::{name}").model) == expected


def test_conditioned_mask2former():
    cfg = Config.fromfile(config_path("any_model/mask2former_r50_spectral-decoder_8xb2-lsj-50e_coco.py"))
    assert check_heads(cfg.model, EIGHTY) == []
    cfg.model.panoptic_head.num_things_classes = 3
    (error,) = check_heads(cfg.model, EIGHTY)
    assert error.startswith("model.panoptic_head.num_things_classes + num_stuff_classes is for 3 classes")


def test_classifiers_of_mmpretrain():
    model = mmengine.hub.get_config("mmpretrain::swin_transformer/swin-tiny_16xb64_in1k.py").model
    model.data_preprocessor = dict(num_classes=10)
    assert head_classes(model) == {"model.head.num_classes": 1000, "model.data_preprocessor.num_classes": 10}
    model.head.loss.num_classes = 7
    assert head_classes(model)["model.head.loss.num_classes"] == 7


def test_what_does_not_count_classes_of_the_dataset_and_models_below_wrappers():
    model = dict(
        backbone=dict(head=dict(num_classes=5)),
        rpn_head=dict(num_classes=1),
        roi_head=dict(
            semantic_head=dict(num_classes=183),
            mask_head=dict(num_classes=1, class_agnostic=True),
            bbox_head=dict(num_classes=80, loss_cls=dict(use_sigmoid=True, class_weight=[1.0])),
        ),
    )
    for wrapper in ("module", "detector"):  # of DetTTAModel and SoftTeacher
        assert head_classes({wrapper: model}) == {f"model.{wrapper}.roi_head.bbox_head.num_classes": 80}
    assert check_heads(model, EIGHTY) == []

"""The embedded instance-segmentation set: written on first use, 160-pixel images, nothing to download."""

_base_ = "mmdet::_base_/datasets/coco_instance.py"

train_pipeline = [
    dict(type="mmspectral.LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="mmdet.Resize", scale=(160, 160), keep_ratio=True),
    dict(type="mmdet.RandomFlip", prob=0.5),
    dict(type="mmdet.PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="mmdet.Resize", scale=(160, 160), keep_ratio=True),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(
        type="mmdet.PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]

train_dataloader = dict(
    batch_size=2,
    persistent_workers=False,
    dataset=dict(
        _delete_=True,
        type="mmspectral.ShapesDataset",
        split="train",
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type="mmspectral.ShapesDataset",
        split="val",
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(type="mmspectral.CocoMetric", ann_file=None)
test_evaluator = val_evaluator

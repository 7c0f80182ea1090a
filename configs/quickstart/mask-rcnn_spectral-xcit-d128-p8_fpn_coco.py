"""The quick-start model on a COCO folder, images of at most 240 x 320 pixels: a check of your data, not a competitor.

Run: MMSPECTRAL_COCO=data/coco/ python tools/train.py with this file.
"""

_base_ = [
    "./mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py",
]

data_root = "{{$MMSPECTRAL_COCO:data/coco/}}"
num_classes = 80
model = dict(
    roi_head=dict(bbox_head=dict(num_classes=num_classes), mask_head=dict(num_classes=num_classes)),
)

train_pipeline = [
    dict(type="mmspectral.LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="mmdet.Resize", scale=(320, 240), keep_ratio=True),
    dict(type="mmdet.RandomFlip", prob=0.5),
    dict(type="mmdet.PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="mmdet.Resize", scale=(320, 240), keep_ratio=True),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(
        type="mmdet.PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]
train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type="mmdet.CocoDataset",
        data_root=data_root,
        ann_file="annotations/instances_train2017.json",
        data_prefix=dict(img="train2017/"),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type="mmdet.CocoDataset",
        data_root=data_root,
        ann_file="annotations/instances_val2017.json",
        data_prefix=dict(img="val2017/"),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/instances_val2017.json")
test_evaluator = val_evaluator

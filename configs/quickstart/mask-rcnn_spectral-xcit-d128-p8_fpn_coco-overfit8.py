"""Overfit the first eight training images of a COCO folder: a quick proof that model, masks and evaluator fit together.

Run: MMSPECTRAL_COCO=data/coco/ python tools/train.py with this file.
"""

_base_ = "./mask-rcnn_spectral-xcit-d128-p8_fpn_coco.py"

# No flip; each epoch repeats the eight images, since starting the workers costs more than two iterations.
train_pipeline = [
    dict(type="mmspectral.LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="mmdet.Resize", scale=(320, 240), keep_ratio=True),
    dict(type="mmdet.PackDetInputs"),
]
train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type="RepeatDataset",
        times=10,
        dataset=dict(
            type="mmdet.CocoDataset",
            data_root={{_base_.data_root}},
            ann_file="annotations/instances_train2017.json",
            data_prefix=dict(img="train2017/"),
            filter_cfg=dict(filter_empty_gt=True, min_size=32),
            pipeline=train_pipeline,
            indices=8,
        ),
    ),
)
val_dataloader = dict(
    dataset=dict(
        ann_file="annotations/instances_train2017.json",
        data_prefix=dict(img="train2017/"),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
        test_mode=False,
        pipeline={{_base_.test_pipeline}},
        indices=8,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=None)
test_evaluator = val_evaluator

max_epochs = 16
train_cfg = dict(max_epochs=max_epochs, val_interval=8)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type="CosineAnnealingLR", by_epoch=True, begin=0, end=max_epochs, T_max=max_epochs, convert_to_iter_based=True
    ),
]

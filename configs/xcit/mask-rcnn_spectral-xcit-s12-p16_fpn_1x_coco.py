"""Mask R-CNN, spectral XCiT small-12 with patch 16, 1x on COCO (12 epochs, no multi-scale). Not trained here.

Run: bash tools/dist_train.sh configs/xcit/mask-rcnn_spectral-xcit-s12-p16_fpn_1x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-xcit-s12-p16_fpn_ms-crop-3x_coco.py"

train_pipeline = [
    dict(type="mmspectral.LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="mmdet.Resize", scale=(1333, 800), keep_ratio=True),
    dict(type="mmdet.RandomFlip", prob=0.5),
    dict(type="mmdet.PackDetInputs"),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))

train_cfg = dict(max_epochs=12)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]

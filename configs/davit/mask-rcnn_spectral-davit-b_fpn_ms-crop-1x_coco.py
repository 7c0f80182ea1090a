"""Mask R-CNN, spectral DaViT-B, multi-scale 1x on COCO (12 epochs). Not trained here.

Run: bash tools/dist_train.sh configs/davit/mask-rcnn_spectral-davit-b_fpn_ms-crop-1x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-davit-b_fpn_ms-crop-3x_coco.py"

model = dict(
    backbone=dict(
        drop_path_rate=0.3,
    ),
)

train_cfg = dict(max_epochs=12)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]

"""Mask R-CNN, spectral DaViT-B, multi-scale 3x on COCO. Not trained here.

Run: bash tools/dist_train.sh configs/davit/mask-rcnn_spectral-davit-b_fpn_ms-crop-3x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-davit-t_fpn_ms-crop-3x_coco.py"

pretrained = "work_dirs/spectral-davit-base_4xb256_in1k/epoch_300.pth"

model = dict(
    backbone=dict(
        arch="base",
        drop_path_rate=0.3,
        init_cfg=dict(checkpoint=pretrained),
    ),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)

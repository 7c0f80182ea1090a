"""Mask R-CNN, spectral Swin-B, 1x on COCO (12 epochs, no multi-scale). Not trained here.

Run: bash tools/dist_train.sh configs/swin/mask-rcnn_spectral-swin-b-p4-w7_fpn_1x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-swin-t-p4-w7_fpn_1x_coco.py"

pretrained = "work_dirs/spectral-swin-base_16xb64_in1k/epoch_300.pth"

model = dict(
    backbone=dict(
        arch="base",
        drop_path_rate=0.3,
        init_cfg=dict(checkpoint=pretrained),
    ),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)

"""Mask R-CNN, spectral Swin-S, multi-scale 3x on COCO. Not trained here.

Run: bash tools/dist_train.sh configs/swin/mask-rcnn_spectral-swin-s-p4-w7_fpn_amp-ms-crop-3x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py"

pretrained = "work_dirs/spectral-swin-small_16xb64_in1k/epoch_300.pth"

model = dict(
    backbone=dict(
        arch="small",
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint=pretrained),
    ),
)

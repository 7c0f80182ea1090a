"""Mask R-CNN, spectral DaViT-S, multi-scale 3x on COCO. Not trained here.

Run: bash tools/dist_train.sh configs/davit/mask-rcnn_spectral-davit-s_fpn_ms-crop-3x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-davit-t_fpn_ms-crop-3x_coco.py"

pretrained = "work_dirs/spectral-davit-small_4xb256_in1k/epoch_300.pth"

model = dict(
    backbone=dict(
        arch="small",
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint=pretrained),
    ),
)

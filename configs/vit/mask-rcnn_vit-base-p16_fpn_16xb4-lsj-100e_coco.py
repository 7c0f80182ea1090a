"""Stock twin: no conditioning, from mmpretrain's weights of the same recipe. Not trained here."""

_base_ = "./mask-rcnn_spectral-vit-base-p16_fpn_16xb4-lsj-100e_coco.py"

pretrained = "https://mmassets.onedl.ai/mmclassification/v0/vit/vit-base-p16_pt-32xb128-mae_in1k_20220623-4c544545.pth"
model = dict(backbone=dict(conditioning=None, init_cfg=dict(checkpoint=pretrained)))

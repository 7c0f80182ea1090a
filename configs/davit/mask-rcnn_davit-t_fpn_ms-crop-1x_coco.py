"""Stock twin: no conditioning, from the authors' ImageNet-1k weights as mmpretrain renamed them. Not trained here."""

_base_ = "./mask-rcnn_spectral-davit-t_fpn_ms-crop-1x_coco.py"

pretrained = "https://mmassets.onedl.ai/mmclassification/v0/davit/davit-tiny_3rdparty_in1k_20221116-700fdf7d.pth"
model = dict(backbone=dict(conditioning=None, init_cfg=dict(checkpoint=pretrained)))

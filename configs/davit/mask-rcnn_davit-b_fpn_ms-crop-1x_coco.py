"""Stock twin: no conditioning, from the authors' ImageNet-1k weights as mmpretrain renamed them. Not trained here."""

_base_ = "./mask-rcnn_spectral-davit-b_fpn_ms-crop-1x_coco.py"

pretrained = "https://mmassets.onedl.ai/mmclassification/v0/davit/davit-base_3rdparty_in1k_20221116-19e0d956.pth"
model = dict(backbone=dict(conditioning=None, init_cfg=dict(checkpoint=pretrained)))

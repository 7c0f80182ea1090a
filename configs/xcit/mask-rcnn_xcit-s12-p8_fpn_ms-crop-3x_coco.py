"""Stock twin: no conditioning, from a stock ImageNet checkpoint. Not trained here."""

_base_ = "./mask-rcnn_spectral-xcit-s12-p8_fpn_ms-crop-3x_coco.py"

pretrained = "work_dirs/xcit-small-12-p8_8xb128_in1k/epoch_400.pth"
model = dict(backbone=dict(conditioning=None, init_cfg=dict(checkpoint=pretrained)))

"""Softmax twin: exact attention. Not trained here."""

_base_ = "./mask-rcnn_dark-swin-t-p4_fpn_amp-ms-crop-3x_coco.py"

model = dict(backbone=dict(kernel=None))

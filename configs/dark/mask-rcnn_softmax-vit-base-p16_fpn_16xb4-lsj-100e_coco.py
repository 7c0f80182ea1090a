"""Softmax twin: exact attention. Not trained here."""

_base_ = "./mask-rcnn_dark-vit-base-p16_fpn_16xb4-lsj-100e_coco.py"

model = dict(backbone=dict(kernel=None))

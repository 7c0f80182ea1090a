"""Softmax twin: exact attention. Not trained here."""

_base_ = "./mask-rcnn_dark-vit-base-p16_fpn_64xb1-lsj-1536-100e_coco.py"

model = dict(backbone=dict(kernel=None))

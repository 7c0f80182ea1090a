"""Softmax twin: exact attention."""

_base_ = "./mask-rcnn_dark-vit-d128-p8_fpn_shapes-512.py"

model = dict(backbone=dict(kernel=None))

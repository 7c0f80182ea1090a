"""Stock twin of the quick start: no conditioning."""

_base_ = "./mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"

model = dict(backbone=dict(conditioning=None))

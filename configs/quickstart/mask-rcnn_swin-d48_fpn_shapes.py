"""Stock twin of the small Swin: no conditioning."""

_base_ = "./mask-rcnn_spectral-swin-d48_fpn_shapes.py"

model = dict(backbone=dict(conditioning=None))

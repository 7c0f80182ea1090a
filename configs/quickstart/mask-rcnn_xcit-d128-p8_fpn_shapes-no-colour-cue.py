"""Stock twin of the XCiT on harder shapes: no conditioning. Not trained here."""

_base_ = "./mask-rcnn_spectral-xcit-d128-p8_fpn_shapes-no-colour-cue.py"

model = dict(backbone=dict(conditioning=None))

"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-vit-large-p16_32xb128_in1k.py"

model = dict(backbone=dict(conditioning=None))

"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-swin-base_16xb64_in1k.py"

model = dict(backbone=dict(conditioning=None))

"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-xcit-small-12-p16_8xb128_in1k.py"

model = dict(backbone=dict(conditioning=None))

"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-deit-tiny_4xb256_in1k.py"

model = dict(backbone=dict(conditioning=None))

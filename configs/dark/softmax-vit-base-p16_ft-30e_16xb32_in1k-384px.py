"""Softmax twin: exact attention. Not trained here."""

_base_ = "./dark-vit-base-p16_ft-30e_16xb32_in1k-384px.py"

model = dict(backbone=dict(kernel=None))

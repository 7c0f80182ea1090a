"""Softmax twin: exact attention. Not trained here."""

_base_ = "./dark-deit-small_ft-30e_8xb128_in1k.py"

model = dict(backbone=dict(kernel=None))

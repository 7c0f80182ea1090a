"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-davit-d96-p4-w4_1xb128_cifar10.py"

model = dict(backbone=dict(conditioning=None))

"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-vit-d192-p4_1xb128_cifar10.py"

model = dict(backbone=dict(conditioning=None))

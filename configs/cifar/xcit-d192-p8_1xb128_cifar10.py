"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-xcit-d192-p8_1xb128_cifar10.py"

model = dict(backbone=dict(conditioning=None))

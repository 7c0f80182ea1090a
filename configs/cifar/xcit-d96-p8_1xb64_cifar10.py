"""Stock twin: no conditioning."""

_base_ = "./spectral-xcit-d96-p8_1xb64_cifar10.py"

model = dict(backbone=dict(conditioning=None))

"""Stock twin: no conditioning."""

_base_ = "./spectral-vit-d96-p4_1xb64_cifar10.py"

model = dict(backbone=dict(conditioning=None))

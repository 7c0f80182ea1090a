"""Stock twin: no conditioning."""

_base_ = "./spectral-deit-d96-p4-distilled_1xb64_cifar10.py"

model = dict(backbone=dict(conditioning=None))

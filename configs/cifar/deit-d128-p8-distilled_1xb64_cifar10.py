"""Stock twin: no conditioning."""

_base_ = "./spectral-deit-d128-p8-distilled_1xb64_cifar10.py"

model = dict(backbone=dict(conditioning=None))

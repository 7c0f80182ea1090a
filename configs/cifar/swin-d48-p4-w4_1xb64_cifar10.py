"""Stock twin: no conditioning."""

_base_ = "./spectral-swin-d48-p4-w4_1xb64_cifar10.py"

model = dict(backbone=dict(conditioning=None))

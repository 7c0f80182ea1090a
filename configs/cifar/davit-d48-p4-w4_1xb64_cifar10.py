"""Stock twin: no conditioning."""

_base_ = "./spectral-davit-d48-p4-w4_1xb64_cifar10.py"

model = dict(backbone=dict(conditioning=None))

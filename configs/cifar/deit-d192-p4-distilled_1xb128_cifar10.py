"""Stock twin: no conditioning. Not trained here."""

_base_ = "./spectral-deit-d192-p4-distilled_1xb128_cifar10.py"

model = dict(backbone=dict(conditioning=None))

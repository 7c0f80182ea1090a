"""The limited regime of arXiv 2603.04127: q, k, v and the kernels are trained, and the head. Not trained here."""

_base_ = "./dark-deit-small_ft-30e_8xb128_in1k.py"

model = dict(
    backbone=dict(
        kernel=dict(type="dark", num_features=128, proposal="sharp", shift="learned"), trainable="projections"
    ),
)

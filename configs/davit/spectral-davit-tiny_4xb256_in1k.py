"""ImageNet-1k, spectral DaViT-T, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/davit/spectral-davit-tiny_4xb256_in1k.py 8 --auto-scale-lr
"""

_base_ = ["mmpretrain::davit/davit-tiny_4xb256_in1k.py", "../_base_/runtime.py"]

model = dict(
    backbone=dict(
        type="mmspectral.SpectralDaViT",
        arch="tiny",
        drop_path_rate=0.1,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
        channel_conditioning=None,  # C would start channel attention one-hot even at 1.0: README.md
        # The function of the official code, from which mmpretrain's differs.
        stem_padding=3,
        gap_before_final_norm=True,
    ),
    neck=None,  # gap_before_final_norm averages over positions
    head=dict(init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02, bias=0.0)),
)

# Recipe: dingmyu/davit, train.py.
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=5),
]

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

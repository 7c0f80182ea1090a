"""ImageNet-1k, spectral DeiT-B, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/deit/spectral-deit-base_16xb64_in1k.py 8 --auto-scale-lr
"""

_base_ = ["mmpretrain::deit/deit-base_16xb64_in1k.py", "../_base_/runtime.py"]

model = dict(
    backbone=dict(
        type="mmspectral.SpectralDeiT",
        arch="deit-base",
        drop_path_rate=0.1,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
    ),
    head=dict(init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02, bias=0.0)),
)

# Recipe: facebookresearch/deit, main.py; 1024 images, learning rate 5e-4 * 1024 / 512, weights averaged at .99996.
optim_wrapper = dict(
    type="AmpOptimWrapper",
    paramwise_cfg=dict(custom_keys={".dist_token": dict(decay_mult=0.0)}),
    clip_grad=None,
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=5),
]

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(
    sampler=dict(type="RepeatAugSampler"), persistent_workers=False, dataset=dict(pipeline=train_pipeline)
)

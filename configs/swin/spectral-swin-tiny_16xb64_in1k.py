"""ImageNet-1k, spectral Swin-T, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/swin/spectral-swin-tiny_16xb64_in1k.py 8 --auto-scale-lr
"""

_base_ = ["mmpretrain::swin_transformer/swin-tiny_16xb64_in1k.py", "../_base_/runtime.py"]

model = dict(
    backbone=dict(
        type="mmspectral.SpectralSwin",
        arch="tiny",
        drop_path_rate=0.2,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
    ),
)

# Recipe: microsoft/Swin-Transformer, config.py, which mmpretrain's config has but for mixed precision.
optim_wrapper = dict(type="AmpOptimWrapper")

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

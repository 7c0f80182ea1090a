"""ImageNet-1k, spectral ViT-B with patch 16, from scratch, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/vit/spectral-vit-base-p16_32xb128_in1k.py 8 --auto-scale-lr
"""

# The recipe of MAE (arXiv 2111.06377, appendix A.2) for supervised training from scratch.
_base_ = ["mmpretrain::vision_transformer/vit-base-p16_32xb128-mae_in1k.py", "../_base_/runtime.py"]

model = dict(
    backbone=dict(
        type="mmspectral.SpectralViT",
        arch="base",
        drop_path_rate=0.1,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
    ),
)

optim_wrapper = dict(type="AmpOptimWrapper")

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

"""ImageNet-1k, spectral XCiT small-12 with patch 16, 400 epochs at 224 pixels. Not trained here.

Top-1 of stock XCiT by its authors, without distillation: 82.0.
Run: bash tools/dist_train.sh configs/xcit/spectral-xcit-small-12-p16_8xb128_in1k.py 8
"""

_base_ = ["mmpretrain::xcit/xcit-small-12-p16_8xb128_in1k.py", "../_base_/runtime.py"]

model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralXCiT",
        arch="small-12",
        patch_size=16,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
        bn_norm_cfg=dict(type="SyncBN"),
    ),
    head=dict(
        loss=dict(_delete_=True, type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
        init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02, bias=0.0),
    ),
)

# Recipe: facebookresearch/xcit, main.py; 8 x 128 = 1024 images, learning rate 5e-4 * 1024 / 512.
optim_wrapper = dict(type="AmpOptimWrapper")
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=5),
]
train_cfg = dict(max_epochs=400)
custom_hooks = [dict(type="mmpretrain.EMAHook", momentum=4e-5, priority="ABOVE_NORMAL")]

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(
    sampler=dict(type="RepeatAugSampler"), persistent_workers=False, dataset=dict(pipeline=train_pipeline)
)

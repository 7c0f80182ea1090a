"""ImageNet-1k, DARK ViT-B fine-tuned from softmax attention at 224 pixels to 384 (577 tokens). Not trained here.

Run on 16 GPUs, or on 8 with --auto-scale-lr:
bash tools/dist_train.sh configs/dark/dark-vit-base-p16_ft-30e_16xb32_in1k-384px.py 8 --auto-scale-lr
"""

_base_ = ["mmpretrain::deit/deit-base_16xb32_in1k-384px.py", "../_base_/runtime.py"]

load_from = "https://mmassets.onedl.ai/mmclassification/v0/vit/vit-base-p16_pt-32xb128-mae_in1k_20220623-4c544545.pth"
model = dict(
    backbone=dict(
        type="mmspectral.DarkViT",
        arch="base",
        kernel=dict(type="dark", num_features=128, proposal="sharp", shift="learned"),
        drop_path_rate=0.1,
    ),
)

optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(lr=2e-5, weight_decay=0.05),
    paramwise_cfg=dict(custom_keys={".kernel.": dict(lr_mult=0.1, decay_mult=0.0)}),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-6, by_epoch=True, begin=1),
]
train_cfg = dict(max_epochs=30)
custom_hooks = [
    dict(type="mmspectral.DarkCalibrationHook", num_batches=4),
    dict(type="mmspectral.FeatureRedrawHook", interval=1000),
]

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

"""ImageNet-1k, DARK DeiT-S fine-tuned from softmax attention, 30 epochs at 224 pixels. Not trained here.

All parameters are trained; dark-deit-small_ft-30e-projections_8xb128_in1k.py trains the projections and kernels alone.
Run on 8 GPUs: bash tools/dist_train.sh configs/dark/dark-deit-small_ft-30e_8xb128_in1k.py 8 --auto-scale-lr
"""

_base_ = ["mmpretrain::deit/deit-small_4xb256_in1k.py", "../_base_/runtime.py"]

load_from = "https://mmassets.onedl.ai/mmclassification/v0/deit/deit-small_pt-4xb256_in1k_20220218-9425b9bb.pth"
model = dict(
    backbone=dict(
        type="mmspectral.DarkDeiT",
        arch="deit-small",
        kernel=dict(type="dark", num_features=128, proposal="sharp", shift="learned"),
        drop_path_rate=0.1,
    ),
)

# A tenth of the rate of the training from scratch; M and the shift start at their calibrated values and move slowly.
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(lr=5e-5),
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
    dict(type="EMAHook", momentum=4e-5, priority="ABOVE_NORMAL"),
]
auto_scale_lr = dict(base_batch_size=1024)

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(batch_size=128, persistent_workers=False, dataset=dict(pipeline=train_pipeline))

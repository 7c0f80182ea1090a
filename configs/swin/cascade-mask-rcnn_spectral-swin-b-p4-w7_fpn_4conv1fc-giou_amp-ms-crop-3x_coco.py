"""Cascade Mask R-CNN, spectral Swin-B, multi-scale 3x on COCO. Not trained here.

Run:
bash tools/dist_train.sh configs/swin/cascade-mask-rcnn_spectral-swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py 8
"""

# mmdet has no Cascade config for Swin; that of ConvNeXt has the same heads, pipelines and schedule.
_base_ = [
    "mmdet::convnext/cascade-mask-rcnn_convnext-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py",
    "../_base_/runtime.py",
]

# The start: a spectral ImageNet checkpoint of this project (configs/swin/spectral-swin-base_16xb64_in1k.py).
# To start from stock weights instead, set their path or URL and conditioning=dict(preserve_function=True).
pretrained = "work_dirs/spectral-swin-base_16xb64_in1k/epoch_300.pth"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralSwin",
        arch="base",
        drop_path_rate=0.3,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
        out_indices=(0, 1, 2, 3),
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)

# Recipe: SwinTransformer/Swin-Transformer-Object-Detection; ConvNeXt's optimizer is another one.
optim_wrapper = dict(
    _delete_=True,
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        custom_keys=dict(
            absolute_pos_embed=dict(decay_mult=0.0),
            relative_position_bias_table=dict(decay_mult=0.0),
            norm=dict(decay_mult=0.0),
        )
    ),
)

val_evaluator = dict(type="mmspectral.CocoMetric")
test_evaluator = val_evaluator

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

"""Mask R-CNN, spectral DaViT-T, multi-scale 3x on COCO. Not trained here.

Run: bash tools/dist_train.sh configs/davit/mask-rcnn_spectral-davit-t_fpn_ms-crop-3x_coco.py 8
"""

_base_ = ["mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco.py", "../_base_/runtime.py"]

# The start: a spectral ImageNet checkpoint of this project (configs/davit/spectral-davit-tiny_4xb256_in1k.py).
# To start from stock weights instead, set their path or URL and conditioning=dict(preserve_function=True).
pretrained = "work_dirs/spectral-davit-tiny_4xb256_in1k/epoch_300.pth"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralDaViT",
        arch="tiny",
        drop_path_rate=0.2,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
        channel_conditioning=None,  # C would start channel attention one-hot even at 1.0: README.md
        stem_padding=3,  # as in the official code
        out_indices=(0, 1, 2, 3),
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
)

# Recipe: dingmyu/davit, mmdet/configs: Swin's but for weight decay on norms too and a shorter warm-up.
optim_wrapper = dict(paramwise_cfg=None)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", begin=0, end=36, by_epoch=True, milestones=[27, 33], gamma=0.1),
]

val_evaluator = dict(type="mmspectral.CocoMetric")
test_evaluator = val_evaluator

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

"""Mask R-CNN, spectral XCiT small-12 with patch 16, multi-scale 3x on COCO. Not trained here.

Box / mask AP of stock XCiT by its authors, from their distilled 384-pixel weights: 45.3 / 40.8.
Recipe: facebookresearch/xcit, detection/configs/xcit (36 epochs, 8 GPUs x 2 images, mixed precision).
Run: bash tools/dist_train.sh configs/xcit/mask-rcnn_spectral-xcit-s12-p16_fpn_ms-crop-3x_coco.py 8
"""

_base_ = ["mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco.py", "../_base_/runtime.py"]

# The start: a spectral ImageNet checkpoint of this project (configs/xcit/spectral-xcit-small-12-p16_8xb128_in1k.py).
# To start from stock XCiT weights instead, set their path and conditioning=dict(preserve_function=True).
pretrained = "work_dirs/spectral-xcit-small-12-p16_8xb128_in1k/epoch_400.pth"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralXCiT",
        arch="small-12",
        patch_size=16,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
        out_type="featmap",
        out_indices=(3, 5, 7, 11),
        bn_norm_cfg=dict(type="SyncBN"),
        init_cfg=dict(type="Pretrained", checkpoint=pretrained, prefix="backbone."),
    ),
    neck=[
        dict(type="mmspectral.Feature2Pyramid", in_channels=384, scales=(4, 2, 1, 0.5), norm_cfg=dict(type="SyncBN")),
        dict(type="FPN", in_channels=[384] * 4, out_channels=256, num_outs=5),
    ],
)

param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", begin=0, end=36, by_epoch=True, milestones=[27, 33], gamma=0.1),
]
optim_wrapper = dict(type="AmpOptimWrapper")

val_evaluator = dict(type="mmspectral.CocoMetric")
test_evaluator = val_evaluator

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

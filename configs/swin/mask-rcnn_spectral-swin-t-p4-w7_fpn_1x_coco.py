"""Mask R-CNN, spectral Swin-T, 1x on COCO (12 epochs, no multi-scale). Not trained here.

Run: bash tools/dist_train.sh configs/swin/mask-rcnn_spectral-swin-t-p4-w7_fpn_1x_coco.py 8
"""

_base_ = ["mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py", "../_base_/runtime.py"]

# The start: a spectral ImageNet checkpoint of this project (configs/swin/spectral-swin-tiny_16xb64_in1k.py).
# To start from stock weights instead, set their path or URL and conditioning=dict(preserve_function=True).
pretrained = "work_dirs/spectral-swin-tiny_16xb64_in1k/epoch_300.pth"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralSwin",
        arch="tiny",
        drop_path_rate=0.2,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
        out_indices=(0, 1, 2, 3),
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
)

val_evaluator = dict(type="mmspectral.CocoMetric")
test_evaluator = val_evaluator

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

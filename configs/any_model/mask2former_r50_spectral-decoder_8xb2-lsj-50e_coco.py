"""Mask2Former, ResNet-50, conditioned q, k and v in the 9 layers of its decoder, on COCO. Not trained here.

Any model of mmdet or mmpretrain is conditioned like this; conditioning=None builds the stock one. lambda = 0.1 leaves
dot-product attention most of its entropy at the start, lambda = 10 would make it one-hot (README, saturation).

Run: bash tools/dist_train.sh configs/any_model/mask2former_r50_spectral-decoder_8xb2-lsj-50e_coco.py 8
"""

_base_ = ["mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py", "../_base_/runtime.py"]

model = dict(
    type="mmspectral.ConditionedModel",
    model_type="Mask2Former",
    conditioning=dict(type="IdentityCorrection", scale=0.1, scope="full"),
    include=["panoptic_head.transformer_decoder"],
)

# Exact resume: ../_base_/runtime.py
default_hooks = _base_.exact_resume
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(persistent_workers=False, dataset=dict(pipeline=train_pipeline))

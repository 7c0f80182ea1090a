"""Spectral DeiT-S on a folder of images per class, from stock ImageNet weights.

Copy this file anywhere, edit "Your data", then: python tools/train.py MY_CONFIG.py. Not trained here.
"""

_base_ = [
    "mmpretrain::_base_/datasets/imagenet_bs64.py",
    "mmpretrain::_base_/default_runtime.py",
    __import__("mmspectral").config_path("_base_/runtime.py"),
]

# Your data: data_root/train/CLASS/*.jpg and data_root/val/CLASS/*.jpg
classes = ("cat", "dog")
data_root = "data/my_images/"

pretrained = "https://mmassets.onedl.ai/mmclassification/v0/deit/deit-small_pt-4xb256_in1k_20220218-9425b9bb.pth"
model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="mmspectral.SpectralDeiT",
        arch="deit-small",
        # W becomes W - C, so that training starts from what the stock weights compute.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full", preserve_function=True),
        drop_path_rate=0.1,
        init_cfg=dict(type="Pretrained", checkpoint=pretrained, prefix="backbone."),
    ),
    head=dict(type="VisionTransformerClsHead", num_classes=len(classes), in_channels=384),
)
data_preprocessor = dict(num_classes=len(classes))
data = dict(_delete_=True, type="CustomDataset", data_root=data_root, metainfo=dict(classes=classes))
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(
    batch_size=32, persistent_workers=False, dataset=dict(data, data_prefix="train", pipeline=train_pipeline)
)
val_dataloader = dict(batch_size=32, dataset=dict(data, data_prefix="val", pipeline=_base_.test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1,))
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(type="AdamW", lr=5e-5, weight_decay=0.05), clip_grad=dict(max_norm=5.0))
param_scheduler = dict(type="CosineAnnealingLR", T_max=20, by_epoch=True, convert_to_iter_based=True)
train_cfg, val_cfg, test_cfg = dict(by_epoch=True, max_epochs=20, val_interval=1), dict(), dict()
default_hooks = _base_.exact_resume

"""Faster R-CNN with spectral Swin-T on your own boxes (COCO-style annotations, masks not needed), from stock weights.

Copy this file anywhere, edit "Your data", then: python tools/train.py MY_CONFIG.py. Not trained here.
"""

_base_ = [
    "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    __import__("mmspectral").config_path("_base_/runtime.py"),
]

# Your data
classes = ("cat", "dog")
data_root = "data/my_dataset/"
train = dict(ann_file="train/annotations.json", data_prefix=dict(img="train/images/"))
val = dict(ann_file="val/annotations.json", data_prefix=dict(img="val/images/"))

pretrained = "https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_tiny_patch4_window7_224.pth"
model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralSwin",
        arch="tiny",
        # W becomes W - C, so that training starts from what the stock weights compute.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full", preserve_function=True),
        out_indices=(0, 1, 2, 3),
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
    roi_head=dict(bbox_head=dict(num_classes=len(classes))),
)
metainfo = dict(classes=classes)
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(
    batch_size=2,
    persistent_workers=False,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline, **train),
)
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, **val))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + val["ann_file"])
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=0.05))
default_hooks = _base_.exact_resume

"""DETR, ResNet-50, on your own boxes (COCO-style), with conditioned attention in its decoder.

`mmspectral.ConditionedModel` conditions any detector or classifier; `include` names the modules (all without it).
Copy this file anywhere, edit "Your data", then: python tools/train.py MY_CONFIG.py. Not trained here.
"""

_base_ = ["mmdet::detr/detr_r50_8xb2-150e_coco.py", __import__("mmspectral").config_path("_base_/runtime.py")]

# Your data
classes = ("cat", "dog")
data_root = "data/my_dataset/"
train = dict(ann_file="train/annotations.json", data_prefix=dict(img="train/images/"))
val = dict(ann_file="val/annotations.json", data_prefix=dict(img="val/images/"))

model = dict(
    type="mmspectral.ConditionedModel",
    model_type="DETR",
    # A small lambda: 10 would make this dot-product attention one-hot. preserve_function is for `load_from` below.
    conditioning=dict(type="IdentityCorrection", scale=0.1, scope="full", preserve_function=True),
    include=["decoder"],
    bbox_head=dict(num_classes=len(classes)),
)
# From scratch DETR takes hundreds of epochs, so start from its COCO weights; set None to train from scratch.
load_from = "https://download.openmmlab.com/mmdetection/v3.0/detr/detr_r50_8xb2-150e_coco/detr_r50_8xb2-150e_coco_20221023_153551-436d03e8.pth"

metainfo = dict(classes=classes)
train_pipeline = [dict(_base_.train_pipeline[0], **_base_.image_loader), *_base_.train_pipeline[1:]]
train_dataloader = dict(
    persistent_workers=False,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline, **train),
)
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, **val))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + val["ann_file"])
test_evaluator = val_evaluator
default_hooks = _base_.exact_resume

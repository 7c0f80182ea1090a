"""Mask R-CNN with spectral XCiT small-12 on your own COCO-style data, from stock ImageNet weights, on GPUs.

Copy this file anywhere, edit "Your data", then: bash tools/dist_train.sh MY_CONFIG.py GPUS --auto-scale-lr
Classes are the names of `categories` in your annotation files, in their order; their ids may be any numbers.

Not trained here.
"""

_base_ = __import__("mmspectral").config_path("xcit/mask-rcnn_spectral-xcit-s12-p16_fpn_ms-crop-3x_coco.py")

# Your data
classes = ("cat", "dog")
data_root = "data/my_dataset/"
train = dict(ann_file="train/annotations.json", data_prefix=dict(img="train/images/"))
val = dict(ann_file="val/annotations.json", data_prefix=dict(img="val/images/"))

# Stock weights are conditioned without changing what they compute: W becomes W - C.
pretrained = "https://mmassets.onedl.ai/mmclassification/v0/xcit/xcit-small-12-p16_3rdparty_in1k_20230213-d36779d2.pth"
model = dict(
    backbone=dict(
        conditioning=dict(preserve_function=True),
        init_cfg=dict(_delete_=True, type="Pretrained", checkpoint=pretrained),
    ),
    roi_head=dict(bbox_head=dict(num_classes=len(classes)), mask_head=dict(num_classes=len(classes))),
)
# The class names go to every data set: without them mmdet looks for the 80 classes of COCO.
metainfo = dict(classes=classes)
train_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, **train))
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, **val))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + val["ann_file"])
test_evaluator = val_evaluator

"""Mask R-CNN with a small spectral XCiT on your own COCO-style data: two CPU cores or one small GPU, from scratch.

Copy this file anywhere, edit "Your data", then: python tools/train.py MY_CONFIG.py
Classes are the names of `categories` in your annotation files, in their order; their ids may be any numbers.
Boxes without masks: boxes-only_faster-rcnn.py. Pre-trained and full size: own-data_full-size.py.
"""

_base_ = __import__("mmspectral").config_path("quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_coco.py")

# Your data
classes = ("cat", "dog")
data_root = "data/my_dataset/"
train = dict(ann_file="train/annotations.json", data_prefix=dict(img="train/images/"))
val = dict(ann_file="val/annotations.json", data_prefix=dict(img="val/images/"))

model = dict(
    roi_head=dict(bbox_head=dict(num_classes=len(classes)), mask_head=dict(num_classes=len(classes))),
)
# The class names go to every data set: without them mmdet looks for the 80 classes of COCO.
metainfo = dict(classes=classes)
train_dataloader = dict(batch_size=2, dataset=dict(data_root=data_root, metainfo=metainfo, **train))
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, **val))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + val["ann_file"])
test_evaluator = val_evaluator

# Larger images, longer training: base config, train_pipeline and max_epochs.

"""Template for your own classes: copy it, then change the four lines below `Your data`. Not trained here.

The class names must be those of `categories` in your COCO annotation files; their ids may be any numbers.
"""

_base_ = "./mask-rcnn_spectral-xcit-s12-p16_fpn_ms-crop-3x_coco.py"

# Your data
classes = ("cat", "dog")
data_root = "data/my_dataset/"
train_ann, train_img = "annotations/train.json", "train/"
val_ann, val_img = "annotations/val.json", "val/"

model = dict(
    roi_head=dict(bbox_head=dict(num_classes=len(classes)), mask_head=dict(num_classes=len(classes))),
)
metainfo = dict(classes=classes)
train_dataloader = dict(
    dataset=dict(data_root=data_root, ann_file=train_ann, data_prefix=dict(img=train_img), metainfo=metainfo)
)
val_dataloader = dict(
    dataset=dict(data_root=data_root, ann_file=val_ann, data_prefix=dict(img=val_img), metainfo=metainfo)
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + val_ann)
test_evaluator = val_evaluator

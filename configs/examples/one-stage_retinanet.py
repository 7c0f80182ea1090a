"""RetinaNet, a one-stage detector, with spectral XCiT tiny-12 on your own boxes (COCO-style), from stock weights.

Copy this file anywhere, edit "Your data", then: python tools/train.py MY_CONFIG.py. Not trained here.
"""

_base_ = ["mmdet::retinanet/retinanet_r50_fpn_1x_coco.py", __import__("mmspectral").config_path("_base_/runtime.py")]

# Your data
classes = ("cat", "dog")
data_root = "data/my_dataset/"
train = dict(ann_file="train/annotations.json", data_prefix=dict(img="train/images/"))
val = dict(ann_file="val/annotations.json", data_prefix=dict(img="val/images/"))

pretrained = "https://mmassets.onedl.ai/mmclassification/v0/xcit/xcit-tiny-12-p16_3rdparty_in1k_20230213-82c547ca.pth"
model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralXCiT",
        arch="tiny-12",
        patch_size=16,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full", preserve_function=True),
        out_type="featmap",
        out_indices=(5, 7, 11),
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    # Maps of stride 16 become strides 8, 16, 32; RetinaNet's FPN adds 64 and 128.
    neck=[
        dict(type="mmspectral.Feature2Pyramid", in_channels=192, scales=(2, 1, 0.5)),
        dict(type="FPN", in_channels=[192] * 3, out_channels=256, add_extra_convs="on_input", num_outs=5),
    ],
    bbox_head=dict(num_classes=len(classes)),
)
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
optim_wrapper = dict(optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=0.05))
default_hooks = _base_.exact_resume

"""As at 1024 pixels, at 1536 (9217 tokens), one image per GPU. Not trained here.

Run on 8 GPUs:
bash tools/dist_train.sh configs/dark/mask-rcnn_dark-vit-base-p16_fpn_64xb1-lsj-1536-100e_coco.py 8 --auto-scale-lr
"""

_base_ = "./mask-rcnn_dark-vit-base-p16_fpn_16xb4-lsj-100e_coco.py"

model = dict(backbone=dict(kernel=dict(type="dark", num_features=128, proposal="sharp", shift="learned")))

image_size = (1536, 1536)
pad = dict(type="mmdet.Pad", size=image_size, pad_val=dict(img=(114, 114, 114)))
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="mmdet.RandomFlip", prob=0.5),
    dict(type="RandomResize", scale=image_size, ratio_range=(0.1, 2.0), keep_ratio=True),
    dict(
        type="mmdet.RandomCrop",
        crop_type="absolute_range",
        crop_size=image_size,
        recompute_bbox=True,
        allow_negative_crop=True,
    ),
    dict(type="mmdet.FilterAnnotations", min_gt_bbox_wh=(1e-2, 1e-2)),
    pad,
    dict(type="mmdet.PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="mmdet.Resize", scale=image_size, keep_ratio=True),
    pad,
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(
        type="mmdet.PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]
train_dataloader = dict(batch_size=1, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

"""COCO instances with large-scale jittering to 1024 x 1024 pixels, 4 images per GPU (ViTDet, arXiv 2203.16527)."""

_base_ = "mmdet::_base_/datasets/coco_instance.py"

image_size = (1024, 1024)
pad = dict(type="mmdet.Pad", size=image_size, pad_val=dict(img=(114, 114, 114)))

train_pipeline = [
    dict(type="mmspectral.LoadImageFromFile"),
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
# Padded to the square of training too: the position embedding is that of a square.
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

train_dataloader = dict(
    batch_size=4, num_workers=8, persistent_workers=False, batch_sampler=None, dataset=dict(pipeline=train_pipeline)
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

val_evaluator = dict(type="mmspectral.CocoMetric")
test_evaluator = val_evaluator

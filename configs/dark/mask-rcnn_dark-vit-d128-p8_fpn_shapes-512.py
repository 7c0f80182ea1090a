"""The small DARK ViT at 512 pixels, 4097 tokens: fine-tuned from softmax attention trained at 160. See README.md.

Run first: python tools/train.py configs/dark/mask-rcnn_softmax-vit-d128-p8_fpn_shapes.py
Then: python tools/train.py configs/dark/mask-rcnn_dark-vit-d128-p8_fpn_shapes-512.py
"""

_base_ = "./mask-rcnn_dark-vit-d128-p8_fpn_shapes.py"

train_pipeline = [
    dict(type="mmspectral.LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="mmdet.RandomFlip", prob=0.5),
    dict(type="mmdet.PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="mmdet.Resize", scale=(512, 512), keep_ratio=True),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True),
    dict(
        type="mmdet.PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]
train_dataloader = dict(dataset=dict(num_images=200, image_size=512, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(num_images=50, image_size=512, pipeline=test_pipeline))
test_dataloader = val_dataloader

max_epochs = 1
train_cfg = dict(max_epochs=max_epochs, val_interval=1)
optim_wrapper = dict(optimizer=dict(lr=4e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=20),
    dict(
        type="CosineAnnealingLR", by_epoch=True, begin=0, end=max_epochs, T_max=max_epochs, convert_to_iter_based=True
    ),
]
load_from = "work_dirs/mask-rcnn_softmax-vit-d128-p8_fpn_shapes/epoch_7.pth"
custom_hooks = [
    dict(type="mmspectral.DarkCalibrationHook", num_batches=4),
    dict(type="mmspectral.FeatureRedrawHook", interval=100),
]

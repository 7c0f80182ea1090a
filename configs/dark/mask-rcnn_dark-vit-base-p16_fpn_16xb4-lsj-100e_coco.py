"""Mask R-CNN, DARK ViT-B with patch 16, the recipe of configs/vit at 1024 pixels (4097 tokens). Not trained here.

Run on 8 GPUs:
bash tools/dist_train.sh configs/dark/mask-rcnn_dark-vit-base-p16_fpn_16xb4-lsj-100e_coco.py 8 --auto-scale-lr
"""

_base_ = "../vit/mask-rcnn_vit-base-p16_fpn_16xb4-lsj-100e_coco.py"

model = dict(
    backbone=dict(
        type="mmspectral.DarkViT",
        kernel=dict(type="dark", num_features=128, proposal="sharp", shift="learned"),
    ),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={".kernel.": dict(lr_mult=0.1, decay_mult=0.0)}))
custom_hooks = [
    dict(type="mmspectral.DarkCalibrationHook", num_batches=4),
    dict(type="mmspectral.FeatureRedrawHook", interval=1000),
]

"""Mask R-CNN, DARK Swin-T, the 3x recipe of configs/swin: attention over the map of each stage. Not trained here.

Run: bash tools/dist_train.sh configs/dark/mask-rcnn_dark-swin-t-p4_fpn_amp-ms-crop-3x_coco.py 8
"""

_base_ = "../swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py"

model = dict(
    backbone=dict(
        type="mmspectral.DarkSwin",
        kernel=dict(type="dark", num_features=128, proposal="sharp", shift="learned"),
    ),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={".kernel.": dict(lr_mult=0.1, decay_mult=0.0)}))
custom_hooks = [
    dict(type="mmspectral.DarkCalibrationHook", num_batches=4),
    dict(type="mmspectral.FeatureRedrawHook", interval=1000),
]

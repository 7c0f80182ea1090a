"""The quick start: a small spectral XCiT Mask R-CNN on the embedded shapes.

Expected and measured figures: README.md beside this file.
Run: bash tools/quickstart.sh, or python tools/train.py with this file.
"""

_base_ = [
    "mmdet::_base_/models/mask-rcnn_r50_fpn.py",
    "../_base_/datasets/shapes_instance.py",
    "mmdet::_base_/schedules/schedule_1x.py",
    "mmdet::_base_/default_runtime.py",
    "../_base_/runtime.py",
]

num_classes = 4
model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralXCiT",
        arch=dict(embed_dims=128, depth=6, num_heads=4),
        patch_size=8,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
        out_type="featmap",
        out_indices=(5,),
        bn_norm_cfg=dict(type="SyncBN"),
    ),
    neck=[
        dict(
            type="mmspectral.Feature2Pyramid",
            in_channels=128,
            scales=(2, 1, 0.5, 0.25),
            norm_cfg=dict(type="SyncBN"),
            from_last_map=True,
        ),
        dict(type="FPN", in_channels=[128] * 4, out_channels=64, num_outs=5, norm_cfg=dict(type="BN")),
    ],
    # Narrow heads with batch norm, which training from scratch needs, and few samples: two CPU cores finish in minutes.
    rpn_head=dict(in_channels=64, feat_channels=64),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, roi_layer=dict(sampling_ratio=2)),
        bbox_head=dict(
            type="ConvFCBBoxHead",
            num_shared_convs=2,
            num_shared_fcs=1,
            conv_out_channels=64,
            norm_cfg=dict(type="BN"),
            in_channels=64,
            fc_out_channels=256,
            num_classes=num_classes,
            reg_class_agnostic=True,
            loss_bbox=dict(loss_weight=2.0),
        ),
        mask_roi_extractor=dict(out_channels=64, roi_layer=dict(sampling_ratio=2)),
        mask_head=dict(
            num_convs=2, norm_cfg=dict(type="BN"), in_channels=64, conv_out_channels=64, num_classes=num_classes
        ),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=300, max_per_img=200),
        rcnn=dict(sampler=dict(num=48)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100)),
)

max_epochs = 7
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="AdamW", lr=8e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(custom_keys={"norm": dict(decay_mult=0.0)}),
    clip_grad=dict(max_norm=10.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(
        type="CosineAnnealingLR", by_epoch=True, begin=0, end=max_epochs, T_max=max_epochs, convert_to_iter_based=True
    ),
]
auto_scale_lr = dict(base_batch_size=2)
default_hooks = dict(
    _base_.exact_resume,
    logger=dict(interval=20),
    checkpoint=dict(_base_.exact_resume.checkpoint, interval=1, max_keep_ckpts=3),
)
randomness = dict(seed=0)

"""Mask R-CNN, spectral ViT-B with patch 16, after ViTDet (arXiv 2203.16527), 100 epochs of COCO. Not trained here.

All attention is global: 4096 tokens in each of 12 blocks at 1024 pixels. README.md lists the differences from ViTDet.
Out of memory: --cfg-options model.backbone.with_cp=True
Run on 8 GPUs:
bash tools/dist_train.sh configs/vit/mask-rcnn_spectral-vit-base-p16_fpn_16xb4-lsj-100e_coco.py 8 --auto-scale-lr
"""

_base_ = [
    "mmdet::_base_/models/mask-rcnn_r50_fpn.py",
    "../_base_/datasets/coco_instance_lsj-1024.py",
    "../_base_/schedules/vitdet_100e.py",
]

# The start: a spectral ImageNet checkpoint of this project (configs/vit/spectral-vit-base-p16_32xb128_in1k.py).
# To start from stock weights instead, set their path or URL and conditioning=dict(preserve_function=True).
pretrained = "work_dirs/spectral-vit-base-p16_32xb128_in1k/epoch_300.pth"

norm_cfg = dict(type="mmpretrain.LN2d")
model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralViT",
        arch="base",
        patch_size=16,
        img_size=224,  # of the position embedding, which is interpolated to each image's grid, as in ViTDet
        drop_path_rate=0.1,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
        out_type="featmap",
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=[
        dict(
            type="mmspectral.Feature2Pyramid",
            in_channels=768,
            scales=(4, 2, 1, 0.5),
            norm_cfg=norm_cfg,
            from_last_map=True,
            halve_channels=True,
        ),
        dict(type="FPN", in_channels=[192, 384, 768, 768], out_channels=256, num_outs=5, norm_cfg=norm_cfg),
    ],
    rpn_head=dict(num_convs=2),
    roi_head=dict(
        bbox_head=dict(type="Shared4Conv1FCBBoxHead", conv_out_channels=256, norm_cfg=norm_cfg),
        mask_head=dict(norm_cfg=norm_cfg),
    ),
)

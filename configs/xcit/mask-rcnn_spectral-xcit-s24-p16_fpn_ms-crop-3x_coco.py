"""Mask R-CNN, spectral XCiT small-24 with patch 16, multi-scale 3x on COCO. Not trained here.

Box / mask AP of stock XCiT by its authors, from their distilled 384-pixel weights: 46.5 / 41.8.
Recipe: facebookresearch/xcit, detection/configs/xcit (36 epochs, 8 GPUs x 2 images, mixed precision).
Run: bash tools/dist_train.sh configs/xcit/mask-rcnn_spectral-xcit-s24-p16_fpn_ms-crop-3x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-xcit-s12-p16_fpn_ms-crop-3x_coco.py"

pretrained = "work_dirs/spectral-xcit-small-24-p16_8xb128_in1k/epoch_400.pth"

model = dict(
    backbone=dict(
        arch="small-24",
        patch_size=16,
        out_indices=(7, 11, 15, 23),
        init_cfg=dict(checkpoint=pretrained),
    ),
    neck=[
        dict(type="mmspectral.Feature2Pyramid", in_channels=384, scales=(4, 2, 1, 0.5), norm_cfg=dict(type="SyncBN")),
        dict(type="FPN", in_channels=[384] * 4, out_channels=256, num_outs=5),
    ],
)

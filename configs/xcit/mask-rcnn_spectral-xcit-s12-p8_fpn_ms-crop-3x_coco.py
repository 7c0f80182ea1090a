"""Mask R-CNN, spectral XCiT small-12 with patch 8, multi-scale 3x on COCO. Not trained here.

Box / mask AP of stock XCiT by its authors, from their distilled 384-pixel weights: 47.0 / 42.3.
Recipe: facebookresearch/xcit, detection/configs/xcit (36 epochs, 8 GPUs x 2 images, mixed precision).
Run: bash tools/dist_train.sh configs/xcit/mask-rcnn_spectral-xcit-s12-p8_fpn_ms-crop-3x_coco.py 8
"""

_base_ = "./mask-rcnn_spectral-xcit-s12-p16_fpn_ms-crop-3x_coco.py"

pretrained = "work_dirs/spectral-xcit-small-12-p8_8xb128_in1k/epoch_400.pth"

model = dict(
    backbone=dict(
        arch="small-12",
        patch_size=8,
        out_indices=(3, 5, 7, 11),
        init_cfg=dict(checkpoint=pretrained),
    ),
    neck=[
        dict(
            type="mmspectral.Feature2Pyramid", in_channels=384, scales=(2, 1, 0.5, 0.25), norm_cfg=dict(type="SyncBN")
        ),
        dict(type="FPN", in_channels=[384] * 4, out_channels=256, num_outs=5),
    ],
)

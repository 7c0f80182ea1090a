"""ImageNet-1k, spectral XCiT medium-24 with patch 16, 400 epochs at 224 pixels. Not trained here.

Top-1 of stock XCiT by its authors, without distillation: 82.7.
Run: bash tools/dist_train.sh configs/xcit/spectral-xcit-medium-24-p16_8xb128_in1k.py 8
"""

_base_ = "./spectral-xcit-small-12-p16_8xb128_in1k.py"

model = dict(
    backbone=dict(
        arch="medium-24",
        patch_size=16,
    ),
    head=dict(in_channels=512),
)

"""ImageNet-1k, spectral XCiT tiny-12 with patch 16, 400 epochs at 224 pixels. Not trained here.

Top-1 of stock XCiT by its authors, without distillation: 77.1.
Run: bash tools/dist_train.sh configs/xcit/spectral-xcit-tiny-12-p16_8xb128_in1k.py 8
"""

_base_ = "./spectral-xcit-small-12-p16_8xb128_in1k.py"

model = dict(
    backbone=dict(
        arch="tiny-12",
        patch_size=16,
    ),
    head=dict(in_channels=192),
)

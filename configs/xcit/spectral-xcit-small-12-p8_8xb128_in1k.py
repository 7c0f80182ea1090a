"""ImageNet-1k, spectral XCiT small-12 with patch 8, 400 epochs at 224 pixels. Not trained here.

Top-1 of stock XCiT by its authors, without distillation: 83.4.
Run: bash tools/dist_train.sh configs/xcit/spectral-xcit-small-12-p8_8xb128_in1k.py 8
"""

_base_ = "./spectral-xcit-small-12-p16_8xb128_in1k.py"

model = dict(
    backbone=dict(
        arch="small-12",
        patch_size=8,
    ),
)

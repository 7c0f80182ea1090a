"""ImageNet-1k, spectral ViT-Ti with patch 16, from scratch, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/vit/spectral-vit-tiny-p16_32xb128_in1k.py 8 --auto-scale-lr
"""

_base_ = "./spectral-vit-base-p16_32xb128_in1k.py"

model = dict(
    backbone=dict(
        arch="deit-tiny",
        drop_path_rate=0.0,
    ),
    head=dict(in_channels=192),
)

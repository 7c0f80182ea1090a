"""ImageNet-1k, spectral ViT-L with patch 16, from scratch, 200 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/vit/spectral-vit-large-p16_32xb128_in1k.py 8 --auto-scale-lr
"""

_base_ = "./spectral-vit-base-p16_32xb128_in1k.py"

model = dict(
    backbone=dict(
        arch="large",
        drop_path_rate=0.2,
    ),
    head=dict(in_channels=1024),
)

train_cfg = dict(max_epochs=200)

"""ImageNet-1k, spectral DaViT-B, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/davit/spectral-davit-base_4xb256_in1k.py 8 --auto-scale-lr
"""

_base_ = "./spectral-davit-tiny_4xb256_in1k.py"

model = dict(
    backbone=dict(
        arch="base",
        drop_path_rate=0.4,
    ),
    head=dict(in_channels=1024),
)

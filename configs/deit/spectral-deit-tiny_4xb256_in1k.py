"""ImageNet-1k, spectral DeiT-Ti, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/deit/spectral-deit-tiny_4xb256_in1k.py 8 --auto-scale-lr
"""

_base_ = "./spectral-deit-base_16xb64_in1k.py"

model = dict(
    backbone=dict(
        arch="deit-tiny",
    ),
    head=dict(in_channels=192),
)

train_dataloader = dict(batch_size=256)

"""ImageNet-1k, spectral Swin-B, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/swin/spectral-swin-base_16xb64_in1k.py 8 --auto-scale-lr
"""

_base_ = "./spectral-swin-tiny_16xb64_in1k.py"

model = dict(
    backbone=dict(
        arch="base",
        drop_path_rate=0.5,
    ),
    head=dict(in_channels=1024),
)

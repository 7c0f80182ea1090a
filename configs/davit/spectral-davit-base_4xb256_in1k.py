"""ImageNet-1k, spectral DaViT-B, 300 epochs at 224 pixels. Not trained here.

Run on 8 GPUs: bash tools/dist_train.sh configs/davit/spectral-davit-base_4xb256_in1k.py 8 --auto-scale-lr
"""

_base_ = "./spectral-davit-tiny_4xb256_in1k.py"

model = dict(
    backbone=dict(
        arch="base",
        drop_path_rate=0.4,
        # The paper's lambda is 10 (scale=10.0), which starts this dot-product attention one-hot: README.md.
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
    ),
    head=dict(in_channels=1024),
)

"""CIFAR-10, a small spectral XCiT of 16 patches. Figures: README.md of this folder."""

_base_ = ["../_base_/datasets/cifar10_folders.py", "../_base_/schedules/cifar10_adamw.py"]

model = dict(
    type="mmpretrain.ImageClassifier",
    backbone=dict(
        type="mmspectral.SpectralXCiT",
        arch=dict(embed_dims=96, depth=4, num_heads=3, cls_attn_layers=1),
        img_size=32,
        patch_size=8,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
    ),
    head=dict(type="mmpretrain.LinearClsHead", in_channels=96),
)

optim_wrapper = dict(optimizer=dict(lr=0.002))

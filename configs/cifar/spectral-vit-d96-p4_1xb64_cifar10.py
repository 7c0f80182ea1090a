"""CIFAR-10, a small spectral ViT of 64 patches. Figures: README.md of this folder."""

_base_ = ["../_base_/datasets/cifar10_folders.py", "../_base_/schedules/cifar10_adamw.py"]

model = dict(
    type="mmpretrain.ImageClassifier",
    backbone=dict(
        type="mmspectral.SpectralViT",
        arch=dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=192),
        img_size=32,
        patch_size=4,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
    ),
    head=dict(type="mmpretrain.VisionTransformerClsHead", in_channels=96),
)

optim_wrapper = dict(optimizer=dict(lr=0.002))

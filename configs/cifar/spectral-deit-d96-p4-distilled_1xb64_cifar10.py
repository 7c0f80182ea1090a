"""CIFAR-10, a small spectral DeiT of 64 patches with a distillation token. Figures: README.md of this folder.

There is no teacher in mmpretrain: this trains the mean of both heads on the labels.
"""

_base_ = ["../_base_/datasets/cifar10_folders.py", "../_base_/schedules/cifar10_adamw.py"]

model = dict(
    type="mmpretrain.ImageClassifier",
    backbone=dict(
        type="mmspectral.SpectralDeiT",
        arch=dict(embed_dims=96, num_layers=4, num_heads=4, feedforward_channels=192),
        img_size=32,
        patch_size=4,
        distillation=True,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
    ),
    head=dict(type="mmpretrain.DeiTClsHead", in_channels=96),
)

optim_wrapper = dict(optimizer=dict(lr=0.002))

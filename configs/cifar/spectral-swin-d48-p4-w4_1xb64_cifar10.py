"""CIFAR-10, a small spectral Swin of 64 patches and two stages. Figures: README.md of this folder."""

_base_ = ["../_base_/datasets/cifar10_folders.py", "../_base_/schedules/cifar10_adamw.py"]

model = dict(
    type="mmpretrain.ImageClassifier",
    backbone=dict(
        type="mmspectral.SpectralSwin",
        arch=dict(embed_dims=48, depths=[2, 4], num_heads=[2, 4]),
        img_size=32,
        window_size=4,
        drop_path_rate=0.0,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
    ),
    neck=dict(type="mmpretrain.GlobalAveragePooling"),
    head=dict(type="mmpretrain.LinearClsHead", in_channels=96),
)

# Learns more slowly than the others, and an epoch takes less time than one of ViT.
train_cfg = dict(max_epochs=7)
param_scheduler = [_base_.param_scheduler[0], dict(_base_.param_scheduler[1], end=7)]

optim_wrapper = dict(optimizer=dict(lr=0.004))

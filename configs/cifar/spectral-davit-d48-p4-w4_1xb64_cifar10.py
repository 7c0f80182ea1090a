"""CIFAR-10, a small spectral DaViT of 64 patches and two stages. Figures: README.md of this folder."""

_base_ = ["../_base_/datasets/cifar10_folders.py", "../_base_/schedules/cifar10_adamw.py"]

model = dict(
    type="mmpretrain.ImageClassifier",
    backbone=dict(
        type="mmspectral.SpectralDaViT",
        arch=dict(embed_dims=48, depths=[1, 2], num_heads=[2, 4]),
        window_size=4,
        drop_path_rate=0.0,
        conditioning=dict(type="IdentityCorrection", scale=10.0, scope="full"),
        channel_conditioning=None,  # C would start channel attention one-hot: configs/davit/README.md
        stem_padding=3,
        gap_before_final_norm=True,
    ),
    head=dict(type="mmpretrain.LinearClsHead", in_channels=96),
)

optim_wrapper = dict(optimizer=dict(lr=0.004))

"""A small spectral Swin on the embedded shapes, with the recipe of the quick start.

Run: python tools/train.py with this file. Figures: README.md of this folder.
"""

_base_ = "./mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.SpectralSwin",
        arch=dict(embed_dims=48, depths=[1, 1, 3, 1], num_heads=[2, 4, 8, 16]),
        window_size=5,  # divides the maps of 160-pixel images: 40, 20, 10, 5
        # Not the paper's 10: dot-product attention would start one-hot (configs/swin/README.md).
        conditioning=dict(type="IdentityCorrection", scale=1.0, scope="full"),
        out_indices=(0, 1, 2, 3),
        drop_path_rate=0.0,
    ),
    neck=[dict(type="FPN", in_channels=[48, 96, 192, 384], out_channels=64, num_outs=5, norm_cfg=dict(type="BN"))],
)

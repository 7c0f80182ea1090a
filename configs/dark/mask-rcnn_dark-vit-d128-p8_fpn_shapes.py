"""A small DARK ViT Mask R-CNN from scratch on the embedded shapes, 160 pixels, 401 tokens.

Its softmax twin is the start of the 512-pixel configs. README.md has what was measured.

Run: python tools/train.py configs/dark/mask-rcnn_dark-vit-d128-p8_fpn_shapes.py
"""

_base_ = "../quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mmspectral.DarkViT",
        arch=dict(embed_dims=128, num_layers=4, num_heads=2, feedforward_channels=512),
        patch_size=8,
        img_size=160,
        kernel=dict(type="dark", num_features=64, proposal="sharp", shift="fixed"),
        out_type="featmap",
        final_norm=False,
    ),
)
custom_hooks = [dict(type="mmspectral.FeatureRedrawHook", interval=100)]

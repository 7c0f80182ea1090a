"""Stock twin: no conditioning, from Microsoft's ImageNet-1k weights. Not trained here."""

_base_ = "./mask-rcnn_spectral-swin-s-p4-w7_fpn_1x_coco.py"

pretrained = "https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_small_patch4_window7_224.pth"
model = dict(backbone=dict(conditioning=None, init_cfg=dict(checkpoint=pretrained)))

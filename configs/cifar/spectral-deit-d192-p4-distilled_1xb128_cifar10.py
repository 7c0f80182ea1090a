"""CIFAR-10, spectral DeiT of 64 patches with a distillation token, for a GPU: 100 epochs. Not trained here."""

_base_ = "./spectral-deit-d96-p4-distilled_1xb64_cifar10.py"

model = dict(
    backbone=dict(
        arch=dict(embed_dims=192, num_layers=8, num_heads=6, feedforward_channels=768),
        drop_path_rate=0.1,
    ),
    head=dict(in_channels=192),
)

train_dataloader = dict(batch_size=128, num_workers=8)
train_cfg = dict(max_epochs=100)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, end=2000),
    dict(type="CosineAnnealingLR", eta_min=0.0, by_epoch=True, end=100, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=128)

"""CIFAR-10, spectral DaViT of 64 patches and two stages, for a GPU: 100 epochs. Not trained here."""

_base_ = "./spectral-davit-d48-p4-w4_1xb64_cifar10.py"

model = dict(
    backbone=dict(arch=dict(embed_dims=96, depths=[1, 3], num_heads=[3, 6]), drop_path_rate=0.1),
    head=dict(in_channels=192),
)

train_pipeline = _base_.long_train_pipeline
train_dataloader = dict(batch_size=128, num_workers=8, dataset=dict(pipeline=train_pipeline))
train_cfg = dict(max_epochs=100)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = _base_.long_param_scheduler
auto_scale_lr = dict(base_batch_size=128)

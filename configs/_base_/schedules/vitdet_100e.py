"""ViTDet's schedule for ViT-B: 100 epochs of COCO at 64 images, layer-wise decay of the learning rate by .7."""

_base_ = ["mmdet::_base_/default_runtime.py", "../runtime.py"]

max_iters = 184375
interval = 5000

train_cfg = dict(
    type="IterBasedTrainLoop",
    max_iters=max_iters,
    val_interval=interval,
    dynamic_intervals=[(max_iters // interval * interval + 1, max_iters)],
)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=250),
    dict(type="MultiStepLR", begin=0, end=max_iters, by_epoch=False, milestones=[163889, 177546], gamma=0.1),
]

optim_wrapper = dict(
    type="AmpOptimWrapper",
    constructor="mmspectral.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.7, norm_decay_mult=0.0),
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1),
)

default_hooks = dict(
    _base_.exact_resume,
    checkpoint=dict(_base_.exact_resume.checkpoint, by_epoch=False, interval=interval, max_keep_ckpts=5),
)
log_processor = dict(by_epoch=False)
auto_scale_lr = dict(enable=False, base_batch_size=64)

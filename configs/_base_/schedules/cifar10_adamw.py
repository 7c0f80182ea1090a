"""AdamW, 5 epochs, 200 updates of warm-up times a cosine to zero; gradient norms are logged, nothing is clipped."""

train_cfg = dict(by_epoch=True, max_epochs=5, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={
            ".cls_token": dict(decay_mult=0.0),
            ".dist_token": dict(decay_mult=0.0),
            ".pos_embed": dict(decay_mult=0.0),
            ".relative_position_bias_table": dict(decay_mult=0.0),
        },
    ),
    clip_grad=dict(max_norm=1e6),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, end=200),
    dict(type="CosineAnnealingLR", eta_min=0.0, by_epoch=True, end=5, convert_to_iter_based=True),
]
long_param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, end=2000),
    dict(type="CosineAnnealingLR", eta_min=0.0, by_epoch=True, end=100, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=64, enable=False)

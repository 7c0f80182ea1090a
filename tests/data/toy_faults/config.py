"""Everything that a resumed run could forget: dropout, augmentation in workers, EMA, stored corrections, schedules.

And random features: redrawn before iterations 2, 4, .. of 16, thus within each epoch of four and between epochs.
"""

_base_ = "../toy_classification/config.py"
custom_imports = dict(imports=["toy_classification", "toy_faults"])

model = dict(
    backbone=dict(
        type="mmspectral.DarkViT",
        arch=dict(num_layers=2),
        drop_rate=0.1,
        drop_path_rate=0.1,
        kernel=dict(type="dark", num_features=16, proposal="sharp", shift="learned"),
        conditioning=dict(type="SVDCorrection", interval=3),
    ),
)

train_pipeline = [
    dict(type="RandomCrop", crop_size=32, padding=4),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackInputs"),
]
train_dataloader = dict(num_workers=1, persistent_workers=False, dataset=dict(pipeline=train_pipeline))

optim_wrapper = dict(optimizer=dict(lr=0.003))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, end=6, by_epoch=False),
    dict(type="ReduceOnPlateauLR", monitor="accuracy/top1", rule="greater", patience=0, factor=0.5),
]
train_cfg = dict(_delete_=True, by_epoch=True, max_epochs=4, val_interval=1)

default_hooks = dict(checkpoint=dict(by_epoch=True, interval=1, max_keep_ckpts=2, save_best="auto"))
custom_hooks = [
    dict(type="Doom"),
    dict(type="mmspectral.CorrectionRefreshHook"),
    dict(type="mmspectral.FeatureRedrawHook", interval=2),
    dict(type="EMAHook", momentum=0.3),
]
randomness = dict(deterministic=True)

"""Everything that a resumed run could forget: dropout, augmentation in workers, EMA, stored corrections, schedules.

And random features: redrawn before iterations 2, 4, .. of 16, thus within each epoch of four and between epochs.
"""

_base_ = "../../../configs/_base_/runtime.py"
custom_imports = dict(imports=["toy_classification", "toy_faults"])
default_scope = "mmpretrain"

model = dict(
    type="ImageClassifier",
    data_preprocessor=dict(type="ClsDataPreprocessor", mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True),
    backbone=dict(
        type="mmspectral.DarkViT",
        arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32),
        img_size=32,
        patch_size=16,
        drop_rate=0.1,
        drop_path_rate=0.1,
        kernel=dict(type="dark", num_features=16, proposal="sharp", shift="learned"),
        conditioning=dict(type="SVDCorrection", interval=3),
    ),
    head=dict(type="VisionTransformerClsHead", num_classes=2, in_channels=16),
)

train_pipeline = [
    dict(type="RandomCrop", crop_size=32, padding=4),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackInputs"),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="DarkOrBright", ann_file="", pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="DarkOrBright", ann_file="", pipeline=[dict(type="PackInputs")]),
)
val_evaluator = dict(type="Accuracy", topk=(1,))

optim_wrapper = dict(optimizer=dict(type="AdamW", lr=0.003))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, end=6, by_epoch=False),
    dict(type="ReduceOnPlateauLR", monitor="accuracy/top1", rule="greater", patience=0, factor=0.5),
]
train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=1)
val_cfg = dict()

default_hooks = dict(
    _base_.exact_resume,
    logger=dict(type="LoggerHook", interval=1),
    checkpoint=dict(type="mmspectral.CheckpointHook", interval=1, max_keep_ckpts=2, save_best="auto"),
)
custom_hooks = [
    dict(type="Doom"),
    dict(type="mmspectral.CorrectionRefreshHook"),
    dict(type="mmspectral.FeatureRedrawHook", interval=2),
    dict(type="EMAHook", momentum=0.3),
]
randomness = dict(seed=0, deterministic=True)

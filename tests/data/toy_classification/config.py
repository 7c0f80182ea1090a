_base_ = "../../../configs/_base_/runtime.py"
custom_imports = dict(imports=["toy_classification"])
default_scope = "mmpretrain"

model = dict(
    type="ImageClassifier",
    data_preprocessor=dict(type="ClsDataPreprocessor", mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True),
    backbone=dict(
        type="VisionTransformer",
        arch=dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=32),
        img_size=32,
        patch_size=16,
    ),
    head=dict(type="VisionTransformerClsHead", num_classes=2, in_channels=16),
)

pipeline = [dict(type="Resize", scale=(32, 32)), dict(type="PackInputs")]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="DarkOrBright", ann_file="", pipeline=pipeline),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="DarkOrBright", ann_file="", pipeline=pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="Accuracy", topk=(1,))
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(type="AdamW", lr=0.01))
param_scheduler = dict(type="LinearLR", start_factor=0.1, end=10, by_epoch=False)
train_cfg = dict(type="IterBasedTrainLoop", max_iters=2, val_interval=2)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=8, enable=False)

default_hooks = dict(
    _base_.exact_resume,
    logger=dict(type="LoggerHook", interval=1),
    checkpoint=dict(type="mmspectral.CheckpointHook", by_epoch=False, interval=2),
    visualization=dict(type="VisualizationHook"),
)
custom_hooks = [dict(type="WriteRank")]
visualizer = dict(type="UniversalVisualizer", vis_backends=[dict(type="LocalVisBackend")])
randomness = dict(seed=0)
env_cfg = dict(dist_cfg=dict(backend="nccl"))

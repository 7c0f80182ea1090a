"""CIFAR-10 as train/CLASS/* and test/CLASS/* below MMSPECTRAL_CIFAR (data/cifar10), and what any classifier needs."""

_base_ = ["mmpretrain::_base_/default_runtime.py", "../runtime.py"]

data_root = "{{$MMSPECTRAL_CIFAR:data/cifar10}}"
model = dict(
    data_preprocessor=dict(
        type="mmpretrain.ClsDataPreprocessor",
        num_classes=10,
        mean=[125.307, 122.961, 113.8575],
        std=[51.5865, 50.847, 51.255],
        to_rgb=True,
    ),
    head=dict(num_classes=10, loss=dict(type="mmpretrain.CrossEntropyLoss", loss_weight=1.0)),
)
train_pipeline = [
    _base_.image_loader,
    dict(type="mmpretrain.RandomFlip", prob=0.5, direction="horizontal"),
    dict(type="mmpretrain.PackInputs"),
]
# For more than a few epochs; in fewer, the borders that a crop brings in cost more than it gives.
long_train_pipeline = [
    train_pipeline[0],
    dict(type="mmpretrain.RandomCrop", crop_size=32, padding=4, padding_mode="reflect"),
    *train_pipeline[1:],
]
test_pipeline = [_base_.image_loader, dict(type="mmpretrain.PackInputs")]
# No workers: 32-pixel images are read in less time than it takes to hand them over. A GPU wants num_workers=8.
train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="mmpretrain.CustomDataset", data_root=data_root, data_prefix="train", pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=250,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="mmpretrain.CustomDataset", data_root=data_root, data_prefix="test", pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="mmpretrain.Accuracy", topk=(1,))
test_evaluator = val_evaluator
default_hooks = dict(_base_.exact_resume, logger=dict(interval=20))

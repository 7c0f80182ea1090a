"""The quick start on harder shapes, of which colour does not give the class away: four times the images, 10 epochs.

Not trained here.
"""

_base_ = "./mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"

train_dataloader = dict(dataset=dict(colour_cue=False, num_images=1600))
val_dataloader = dict(dataset=dict(colour_cue=False))
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=10, val_interval=5)
param_scheduler = [
    _base_.param_scheduler[0],
    dict(_base_.param_scheduler[1], end=10, T_max=10),
]

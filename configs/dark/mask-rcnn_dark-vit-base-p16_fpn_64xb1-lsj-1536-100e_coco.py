"""As at 1024 pixels, at 1536 (9217 tokens), one image per GPU. Not trained here.

Run on 8 GPUs:
bash tools/dist_train.sh configs/dark/mask-rcnn_dark-vit-base-p16_fpn_64xb1-lsj-1536-100e_coco.py 8 --auto-scale-lr
"""

_base_ = "./mask-rcnn_dark-vit-base-p16_fpn_16xb4-lsj-100e_coco.py"

image_size = (1536, 1536)


def resize(pipeline):
    """Put our size where the base has its own."""
    return [{key: image_size if value == _base_.image_size else value for key, value in t.items()} for t in pipeline]


pad = dict(_base_.pad, size=image_size)
train_pipeline = resize(_base_.train_pipeline)
test_pipeline = resize(_base_.test_pipeline)
train_dataloader = dict(batch_size=1, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

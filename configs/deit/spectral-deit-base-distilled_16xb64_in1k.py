"""ImageNet-1k, spectral DeiT-B with a distillation token, 300 epochs at 224 pixels. Not trained here.

There is no teacher in mmpretrain: this trains the mean of both heads on the labels. It is for evaluating and
finetuning distilled weights (README.md).

Run on 8 GPUs: bash tools/dist_train.sh configs/deit/spectral-deit-base-distilled_16xb64_in1k.py 8 --auto-scale-lr
"""

_base_ = "./spectral-deit-base_16xb64_in1k.py"

model = dict(
    backbone=dict(
        distillation=True,
    ),
    head=dict(type="DeiTClsHead"),
)

"""A synthetic dataset, and a hook that writes down what each rank ended with."""

from pathlib import Path

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmpretrain.datasets import BaseDataset
from mmpretrain.registry import DATASETS


@DATASETS.register_module()
class DarkOrBright(BaseDataset):
    """Noise images of 32 x 32 pixels; class 1 is brighter."""

    METAINFO = {"classes": ("dark", "bright")}

    def load_data_list(self):
        noise = np.random.default_rng(0).integers(0, 100, (16, 32, 32, 3), dtype=np.uint8)
        return [dict(img=image + np.uint8(100 * (index % 2)), gt_label=index % 2) for index, image in enumerate(noise)]


@HOOKS.register_module()
class WriteRank(Hook):
    """Save each rank's parameters, which of them got a gradient, and how often it evaluated."""

    def before_train(self, runner):
        self.with_gradient, self.evaluations = set(), 0
        for name, parameter in runner.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.with_gradient.add(name))

    def after_val_epoch(self, runner, metrics=None):
        self.evaluations += 1

    def after_train(self, runner):
        result = dict(
            parameters={name: value.detach() for name, value in runner.model.named_parameters()},
            with_gradient=sorted(self.with_gradient),
            evaluations=self.evaluations,
            wrapper=type(runner.model).__name__,
        )
        torch.save(result, Path(runner.work_dir, f"rank{get_rank()}.pth"))

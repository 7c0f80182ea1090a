"""A hook that writes down what each rank ended with."""

from pathlib import Path

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class WriteRankState(Hook):
    """Save each rank's parameters, those that never got a gradient, and how often it evaluated."""

    def before_train(self, runner):
        self.waiting, self.evaluations = {name for name, _ in runner.model.named_parameters()}, 0
        for name, parameter in runner.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.waiting.discard(name))

    def after_val_epoch(self, runner, metrics=None):
        self.evaluations += 1

    def after_train(self, runner):
        result = dict(
            parameters={name: value.detach() for name, value in runner.model.named_parameters()},
            without_gradient=sorted(self.waiting),
            evaluations=self.evaluations,
            wrapper=type(runner.model).__name__,
        )
        torch.save(result, Path(runner.work_dir, f"rank{get_rank()}.pth"))

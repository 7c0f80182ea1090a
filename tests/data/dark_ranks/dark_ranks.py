"""A hook that lets ranks calibrate on different images, and writes down what kernels each ends with."""

from pathlib import Path

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class WriteKernels(Hook):
    """Change the seed of the images on the second rank, and save the kernels after training."""

    priority = "HIGH"

    def before_train(self, runner):
        for hook in runner.hooks:
            if type(hook).__name__ == "DarkCalibrationHook":
                hook.images["seed"] += get_rank()

    def after_train(self, runner):
        kernels = {name.removeprefix("module."): t for name, t in runner.model.state_dict().items() if "kernel" in name}
        torch.save(kernels, Path(runner.work_dir, f"kernels{get_rank()}.pth"))

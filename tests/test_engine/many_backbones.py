"""Every backbone of ours as one model in float64, with a loss that is linear in their outputs; a hook that saves state.

Imported by the configs of test_distributed_equality.py.
"""

from pathlib import Path

import torch
from checkpointed_ranks import FAMILIES, tensors
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmspectral.models import backbones

# Each family under each: stored activations, then recomputed ones with buffers that follow the weights.
VARIANTS = {
    "identity": dict(conditioning=dict(type="IdentityCorrection", scale=0.5)),
    "svd": dict(conditioning=dict(type="SVDCorrection", interval=2), with_cp=True),
}


@DATASETS.register_module()
class NoiseImages(torch.utils.data.Dataset):
    """16 images of noise, each different."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return dict(inputs=torch.randn(3, 32, 32, dtype=torch.float64, generator=generator))


@MODELS.register_module()
class ManyBackbones(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbones = nn.ModuleDict(
            {
                f"{family}_{variant}": getattr(backbones, family)(**settings, **changes, drop_path_rate=0.0)
                for family, settings in FAMILIES.items()
                for variant, changes in VARIANTS.items()
            }
        )
        self.double()

    def init_weights(self):
        """Keep torch's draw: mmengine's initialisation writes a line for each of many parameters."""

    def train(self, mode=True):
        """Freeze the statistics of batch norms, which are those of each rank."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, inputs, mode="tensor"):
        losses = {}
        for name, backbone in self.backbones.items():
            for number, out in enumerate(tensors(backbone(inputs))):
                generator = torch.Generator().manual_seed(number)
                direction = torch.randn(out.shape[1:], dtype=out.dtype, generator=generator)
                losses[f"{name}_{number}_loss"] = (out * direction).mean()
        return losses


@HOOKS.register_module()
class WriteState(Hook):
    """Save each rank's parameters and buffers before and after training, and the rate of each iteration."""

    def before_train(self, runner):
        self.start, self.learning_rates = _state(runner.model), []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.learning_rates.extend(runner.optim_wrapper.get_lr()["lr"])

    def after_train(self, runner):
        result = dict(start=self.start, end=_state(runner.model), learning_rates=self.learning_rates)
        torch.save(result, Path(runner.work_dir, f"rank{get_rank()}.pth"))


def _state(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name.removeprefix("module."): tensor.detach().clone() for name, tensor in tensors}

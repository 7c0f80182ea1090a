"""The control of the conditioning study: an unconditioned model that starts at W + C and decays towards C."""

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from mmspectral.analysis import attention_projections
from mmspectral.layers import build_conditioning


@HOOKS.register_module()
class ShiftedStartHook(Hook):
    """Give every q, k, v projection of a stock model the start and the weight decay that a constant C amounts to.

    Under decoupled weight decay (AdamW) this is training with W + C, up to rounding.

    Args:
        conditioning: Settings of the correction, whose C is constant.
    """

    def __init__(self, conditioning: dict) -> None:
        self.conditioning = build_conditioning(conditioning)
        self.targets: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    @torch.no_grad()
    def before_train(self, runner: Runner) -> None:
        """Add C to the weights, but not to those of a resumed run, which has it."""
        for projection in attention_projections(runner.model).values():
            weight = projection.weight
            self.targets.append((weight, self.conditioning.matrix(weight, projection.layout)))
            if runner.iter == 0:
                weight += self.targets[-1][1]

    @torch.no_grad()
    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Undo the decay of C; the learning rate is still that of the update."""
        groups = {id(p): group for group in runner.optim_wrapper.param_groups for p in group["params"]}
        for weight, C in self.targets:
            weight.add_(C, alpha=groups[id(weight)]["lr"] * groups[id(weight)]["weight_decay"])

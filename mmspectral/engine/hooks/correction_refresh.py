"""Refresh stored corrections every so many updates, and in averaged copies of the model."""

import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from mmspectral.layers import refresh_corrections, stored_corrections
from mmspectral.registry import HOOKS


@HOOKS.register_module()
class CorrectionRefreshHook(Hook):
    """Keep C up to date where ``conditioning`` has ``interval=n``: ``custom_hooks=[dict(type='mmspectral....')]``.

    C is recomputed from W before updates 0, n, 2n, ... of the optimizer, of which one takes ``accumulative_counts``
    iterations. The rule depends on the iteration alone and C is in the checkpoint, so a resumed run continues as it
    would have. Ranks need not communicate: equal weights give equal C.

    Beside mmengine's ``EMAHook``, or a subclass such as mmpretrain's, the averaged model is validated, tested and
    saved with the C of its averaged W, whatever ``update_buffers`` says, and training goes on with the C it had. Call
    :func:`mmspectral.layers.refresh_corrections` on other averages before their forward pass.
    """

    priority = "ABOVE_NORMAL"  # before EMAHook, usually NORMAL, swaps, saves or evaluates

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        accumulated = getattr(runner.optim_wrapper, "_accumulative_counts", 1)
        if runner.iter % accumulated == 0:
            refresh_corrections(runner.model, updates=runner.iter // accumulated)

    def before_val_epoch(self, runner: Runner) -> None:
        self._swap(runner, to_average=True)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self._swap(runner, to_average=False)

    before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Give the averaged copy, which becomes the ``state_dict`` of the checkpoint, the C of its W."""
        for hook in _ema_hooks(runner):
            refresh_corrections(hook.ema_model)

    @torch.no_grad()
    def _swap(self, runner: Runner, to_average: bool) -> None:
        """Exchange the C of model and averaged copy, as the EMA hook exchanges their W."""
        for hook in _ema_hooks(runner):
            if not getattr(hook, "evaluate_on_ema", True):  # an option of mmpretrain's
                continue
            if to_average:
                refresh_corrections(hook.ema_model)
            if hook.ema_model.update_buffers:  # then the EMA hook exchanges buffers too
                continue
            model = runner.model.module if is_model_wrapper(runner.model) else runner.model
            for own, averaged in zip(
                stored_corrections(model).values(), stored_corrections(hook.ema_model.module).values(), strict=True
            ):
                C = own.correction.clone()
                own.correction.copy_(averaged.correction)
                averaged.correction.copy_(C)


def _ema_hooks(runner: Runner) -> list[EMAHook]:
    return [hook for hook in runner.hooks if isinstance(hook, EMAHook)]

"""Draw the features of linear attention anew every so many updates, and give averaged copies of the model the same."""

from collections.abc import Iterator

from mmengine.hooks import EMAHook, Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.model import BaseAveragedModel
from mmengine.runner import EpochBasedTrainLoop, Runner

from mmspectral.arguments import FLAG, checked, whole
from mmspectral.layers import feature_kernels
from mmspectral.registry import HOOKS


@HOOKS.register_module()
class FeatureRedrawHook(Hook):
    """Redraw every :class:`mmspectral.layers.RandomFeatureKernel`: ``custom_hooks=[dict(type='mmspectral....')]``.

    Before updates n, 2n, ... of the optimizer, of which one takes ``accumulative_counts`` iterations, or before epochs
    n, 2n, ..., w is redrawn in place. Draws are a function of the kernel's seed, its layer and its counter
    ``redraws``, which is in the checkpoint: a resumed run draws what it would have drawn, and ranks need not
    communicate. What is trained or calibrated (M, the shift, the proposal, the w of kernel ``learned``) stays.

    Beside mmengine's ``EMAHook``, or a subclass such as mmpretrain's, the averaged model gets draws and counter of the
    trained one after each update, whatever ``update_buffers`` says: a mean of two draws is no draw.

    Args:
        interval: n; to keep the first draws, leave the hook out.
        by_epoch: Whether n counts epochs (of an epoch-based loop) instead of updates.

    Raises:
        ValueError: ``interval`` is no positive integer, or epochs are to be
            counted in a loop that has one.
    """

    priority = "BELOW_NORMAL"  # after EMAHook, usually NORMAL: a mean of equals may be rounded; before checkpoints

    @checked(interval=whole(1), by_epoch=FLAG)
    def __init__(self, interval: int, by_epoch: bool = False) -> None:
        self.interval = interval
        self.by_epoch = by_epoch

    def before_train(self, runner: Runner) -> None:
        """Check that there is something to do."""
        if self.by_epoch and not isinstance(runner.train_loop, EpochBasedTrainLoop):
            raise ValueError(
                "FeatureRedrawHook: by_epoch=True needs an epoch-based loop; with IterBasedTrainLoop give the interval "
                "in updates."
            )
        if not any(kernel.draws for kernel in feature_kernels(runner.model).values()):
            runner.logger.warning("FeatureRedrawHook: no attention of the model draws features; nothing is redrawn.")

    def before_train_epoch(self, runner: Runner) -> None:
        if self.by_epoch:
            self._redraw(runner, runner.epoch)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        accumulated = getattr(runner.optim_wrapper, "_accumulative_counts", 1)
        if not self.by_epoch and runner.iter % accumulated == 0:
            self._redraw(runner, runner.iter // accumulated)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, outputs: dict | None = None
    ) -> None:
        """Undo what averaging did to draws and counters."""
        for average in averaged_models(runner):
            kernels = feature_kernels(runner.model).values()
            for own, averaged in zip(kernels, feature_kernels(average).values(), strict=True):
                if own.draws:
                    averaged.w.copy_(own.w)
                    averaged.redraws.copy_(own.redraws)

    def _redraw(self, runner: Runner, done: int) -> None:
        if done and done % self.interval == 0:
            for kernel in feature_kernels(runner.model).values():
                if kernel.draws:
                    kernel.redraw(int(kernel.redraws) + 1)


def averaged_models(runner: Runner) -> Iterator[BaseAveragedModel]:
    """Yield the averaged copies of the model that EMA hooks keep."""
    return (hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook))

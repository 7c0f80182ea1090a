"""Run the validation that a killed run did not finish."""

from bisect import bisect

from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, Runner

from mmspectral.registry import HOOKS

_STARTED = "validation_started_at"


@HOOKS.register_module()
class DueValidationHook(Hook):
    """Validate a resumed model before training goes on, if that was the next thing to do.

    A checkpoint is written before the validation of its epoch. mmengine resumes
    with the next epoch: the metrics of the one before are lost, after the last
    epoch those of the run, and so is what depends on them, such as the best
    checkpoint or a schedule that waits for a plateau.

    A checkpoint that was written again during its validation, because it was the
    best one, says so, and is not validated twice.
    """

    priority = "LOWEST"  # other hooks prepare themselves in before_train

    def before_train(self, runner: Runner) -> None:
        """Validate if the run was resumed where a validation is due."""
        if runner.iter and _is_due(runner) and runner.message_hub.get_info(_STARTED, None) != runner.iter:
            runner.logger.info(f"Validating the checkpoint: this was due at iteration {runner.iter}.")
            runner.val_loop.run()

    def before_val(self, runner: Runner) -> None:
        """Note the validation for a checkpoint that is written at its end."""
        runner.message_hub.update_info(_STARTED, runner.iter)


def _is_due(runner: Runner) -> bool:
    """Whether the training loop, had it come here by itself, would validate now."""
    loop = runner.train_loop
    if runner.val_loop is None:
        return False
    by_epoch = isinstance(loop, EpochBasedTrainLoop)
    step, last = (loop.epoch, loop.max_epochs) if by_epoch else (loop.iter, loop.max_iters)
    interval = loop.dynamic_intervals[bisect(loop.dynamic_milestones, step + 1) - 1]
    return step >= loop.val_begin and (step % interval == 0 or step == last)

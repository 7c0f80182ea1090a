"""mmengine's early stopping, which a resumed run continues."""

import mmengine.hooks
from mmengine.runner import Runner

from mmspectral.registry import HOOKS


@HOOKS.register_module()
class EarlyStoppingHook(mmengine.hooks.EarlyStoppingHook):
    """Stop where the uninterrupted run would have stopped.

    mmengine's hook, whose arguments it takes, keeps the best score and the count
    of validations without a better one in itself: in a resumed run both begin
    anew. This one keeps them in the message hub, and so in each checkpoint.
    """

    priority = "LOW"  # before the checkpoint hook, whose best checkpoint then knows the validation that it is of

    def before_train(self, runner: Runner) -> None:
        """Repeat the last decision of the run that is continued, by the settings of this one."""
        state = runner.message_hub.get_info(self._key, None)
        if state is not None:
            self.best_score, self.wait_count, score = state
            super().after_val_epoch(runner, {self.monitor: score})

    def after_val_epoch(self, runner: Runner, metrics: dict) -> None:
        """Note what the decision depends on, and decide."""
        if self.monitor in metrics:
            state = [float(self.best_score), self.wait_count, float(metrics[self.monitor])]
            runner.message_hub.update_info(self._key, state)
        super().after_val_epoch(runner, metrics)

    @property
    def _key(self) -> str:
        return f"early_stopping/{self.monitor}"

"""A hook that lets one rank end, or stop, in the middle of training. Imported by the configs of test_dead_rank.py."""

import os
import signal

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class DyingRank(Hook):
    """In the second iteration rank 1 gets the signal of that name, or raises."""

    def __init__(self, how):
        self.how = how

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter != 1 or get_rank() != 1:
            return
        if self.how == "raise":
            raise ArithmeticError("rank 1 met something odd")
        os.kill(os.getpid(), signal.Signals[self.how])

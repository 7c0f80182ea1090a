"""Whether two runs are the same, bit for bit: weights, averages, optimizer, schedules, losses and metrics."""

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from tests.helpers import log_lines


def state(path):
    return torch.load(path, weights_only=False, map_location="cpu")


def assert_same(a, b, where):
    (ours, shape), (others, other_shape) = tree_flatten(a), tree_flatten(b)
    assert shape == other_shape, where
    for x, y in zip(ours, others, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, where


def assert_same_run(straight, resumed, last):
    """Compare the checkpoints of the name ``last``, and the metrics that came after them."""
    a, b = state(straight / last), state(resumed / last)
    for key in ("state_dict", "ema_state_dict", "optimizer", "param_schedulers"):
        assert (key in a) == (key in b), key
        if key in a:
            assert_same(a[key], b[key], key)
    ours, others = (checkpoint["message_hub"]["log_scalars"] for checkpoint in (a, b))
    compared = [name for name in ours if "time" not in name]
    assert "train/loss" in compared and any(name.startswith("val/") for name in compared), compared
    for name in compared:
        np.testing.assert_array_equal(ours[name]._log_history, others[name]._log_history, err_msg=name)
    assert metrics(straight) == metrics(resumed)


def metrics(work_dir):
    """Return the metrics that the newest run wrote last."""
    last = [row for row in log_lines(work_dir) if "loss" not in row][-1]
    return {name: value for name, value in last.items() if "time" not in name}

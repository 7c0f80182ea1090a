"""Whether two runs are the same, bit for bit: weights, averages, optimizer, schedules, losses and metrics."""

import json

import numpy as np
import torch


def state(path):
    return torch.load(path, weights_only=False, map_location="cpu")


def assert_same(a, b, where):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


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
    newest = max(work_dir.glob("*/vis_data/scalars.json"), key=lambda file: file.parts)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    last = [row for row in rows if "loss" not in row][-1]
    return {name: value for name, value in last.items() if "time" not in name}

"""The study that replaces the attention of a trained ViT: one small run of each command."""

import csv

import torch
from mmengine.logging import MMLogger

from tests.helpers import class_folders


def test_attention_swap(call_tool, tmp_path, monkeypatch):
    for part in ("train", "test"):
        class_folders(tmp_path / part, ("a", "b"), size=(8, 8))
    # In this process, of which a logger and the number of threads would stay as the tool sets them.
    loggers = MMLogger._instance_dict
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def run(*arguments):
        monkeypatch.setattr(MMLogger, "_instance_dict", loggers.copy())
        status, output, errors = call_tool("experiments/attention_swap.py", *arguments)
        assert not status, errors
        return output

    where = ["--data", tmp_path, "--checkpoint", tmp_path / "softmax.pth"]
    assert "epoch 1: accuracy" in run("train", *where, "--epochs", 1, "--arch", 16, 1, 2, 16)
    study = [*where, "--csv", tmp_path / "swap.csv", "--epochs", 1, "--images", 4, "--batch-size", 4, "--seeds", 1]
    grid = ["grid", *study, "--kernels", "exact", "temperature", "--features", 4, "--regimes", "limited"]
    assert run(*grid).count("SwapRow") == 2
    assert run(*grid) == "", "rows that the file has are not measured again"
    sweep = ["sweep", *study, "--kernels", "performer", "--features", 4, "--lrs"]
    assert run(*sweep, 1e-3).count("SwapRow") == 1
    assert run(*sweep, 1e-3, 1e-2).count("SwapRow") == 1
    output = run("report", "--csv", tmp_path / "swap.csv", "--plot", tmp_path / "swap.svg")
    assert "| temperature | 4 |" in output and "| performer | 0.01 |" in output
    assert (tmp_path / "swap.svg").stat().st_size > 1000
    with (tmp_path / "swap.csv").open() as file:
        assert [line["study"] for line in csv.DictReader(file)] == ["grid", "grid", "sweep", "sweep"]

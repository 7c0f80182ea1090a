"""The study that replaces the attention of a trained ViT: one small run of each command."""

import csv
import runpy
import sys
from pathlib import Path

import torch
from mmengine.logging import MMLogger
from PIL import Image

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "experiments" / "attention_swap.py"


def test_attention_swap(tmp_path, monkeypatch, capsys):
    for part in ("train", "test"):
        for label, name in enumerate(("a", "b")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (8, 8), (200 * label, 10 * i, 0)).save(tmp_path / part / name / f"{i}.png")
    # In this process, of which a logger and the number of threads would stay as the tool sets them.
    loggers = MMLogger._instance_dict
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def run(*arguments):
        monkeypatch.setattr(MMLogger, "_instance_dict", loggers.copy())
        monkeypatch.setattr(sys, "argv", ["attention_swap.py", *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

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

"""Training steps of configs are timed in turn, on the data of the first."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "analysis_tools" / "benchmark_configs.py"
CONFIGS = [f"configs/dark/mask-rcnn_{kind}-vit-d128-p8_fpn_shapes.py" for kind in ("softmax", "dark")]
SMALL = ["model.backbone.arch.num_layers=1", "train_dataloader.dataset.num_images=2"]


@pytest.mark.slow
def test_table_of_a_pair():
    command = [sys.executable, TOOL, *CONFIGS, "--rounds", "2", "--threads", "1", "--cfg-options", *SMALL]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    first, second = ([cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()[-2:])
    assert [first[0], second[0]] == [Path(config).stem for config in CONFIGS]
    assert first[1] == "1.000 (1.000 to 1.000)"
    assert "2 images of (3, 160, 160)" in printed
    for row in (first, second):
        seconds, peak = map(float, row[2:])
        assert 0 < seconds < 60 and 200 < peak < 8000


def test_one_round_is_refused():
    command = [sys.executable, TOOL, *CONFIGS, "--rounds", "1"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2 and "at least 2 rounds" in refused.stderr

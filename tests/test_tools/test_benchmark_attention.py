"""The attention benchmark: its table, its plot and what it says about the crossover."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "analysis_tools" / "benchmark_attention.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("benchmark_attention", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(softmax, dark):
    lengths = (16, 64, 256)
    return [dict(impl="softmax", n=n, fwd_bwd_ms=t) for n, t in zip(lengths, softmax, strict=True)] + [
        dict(impl="dark", n=n, fwd_bwd_ms=t) for n, t in zip(lengths, dark, strict=True)
    ]


@pytest.mark.parametrize(
    ("softmax", "dark", "says"),
    [
        ((1, 2, 9), (2, 3, 4), "softmax is faster than dark up to 64, dark from 256 on"),
        ((3, 4, 9), (2, 3, 4), "dark is faster than softmax at every length measured, from 16 on"),
        ((1, 2, 3), (2, 3, 4), "softmax is faster than dark at 256, the greatest length"),
    ],
)
def test_crossover(tool, softmax, dark, says):
    assert tool.crossover(rows(softmax, dark), "dark").startswith(says)


@pytest.mark.parametrize("name", ["softmax", "dark", "dark-sharp", "performer"])
@pytest.mark.parametrize("backward", [False, True])
def test_every_implementation_of_ours_makes_a_step(tool, monkeypatch, name, backward):
    monkeypatch.setattr(sys, "argv", ["benchmark_attention.py", "--device", "cpu", "--heads", "2", "--head-dim", "8"])
    tool.make_step(name, 5, tool.parse_args(), backward)()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux' /proc")
def test_table_and_plot(run_command, tmp_path):
    out, plot = tmp_path / "attention.csv", tmp_path / "attention.png"
    options = ["--lengths", 2048, "--impl", "softmax", "dark", "darkformer-pytorch"]
    output = run_command(sys.executable, TOOL, *options, "--rounds", 2, "--threads", 1, "--out", out, "--plot", plot)
    with out.open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["impl", "n", "fwd_ms", "fwd_bwd_ms", "peak_extra_mib"]
    names = {row["impl"] for row in table}
    assert {"softmax", "dark"} <= names
    assert "darkformer-pytorch" in names or "darkformer-pytorch is left out" in output
    assert all(float(row["fwd_ms"]) > 0 for row in table)
    outputs = 2048 * 6 * 64 * 4 / 2**20  # q, k, v, their gradients and the output are of this size
    peaks = {row["impl"]: float(row["peak_extra_mib"]) for row in table}
    assert 0.9 * outputs < peaks["dark"] <= 4 * outputs + 32
    assert plot.stat().st_size > 0

"""The benchmark script: what it computes from times, and one small table of each command."""

import csv
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "analysis_tools" / "benchmark.py"
CONFIGS = [f"configs/dark/mask-rcnn_{kind}-vit-d128-p8_fpn_shapes.py" for kind in ("softmax", "dark")]
COSTS = dict(stock=1.0, ours=1.5, other=0.5)


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # An import of mmpretrain for each process would take most of the time of the test.
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    return module


@pytest.fixture
def table(tool, monkeypatch, capsys, tmp_path):
    """Return a function that runs a command in this process and reads its CSV file."""

    def run(*arguments):
        out = tmp_path / "table.csv"
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments), "--rounds", "2", "--out", str(out)])
        tool.main()
        with out.open() as file:
            rows = list(csv.DictReader(file))
        printed = capsys.readouterr().out
        assert f"| {' | '.join(rows[0])} |" in printed and f"| {' | '.join(rows[-1].values())} |" in printed
        return rows

    return run


def test_everything_takes_turns_and_a_machine_that_slows_down_does_not_change_ratios(tool):
    calls, now = [], [0.0]

    def step(name):
        calls.append(name)
        now[0] += COSTS[name] * 2 ** ((len(calls) - 1) // 3)

    seconds = tool.time_in_turn({name: lambda name=name: step(name) for name in COSTS}, 6, clock=lambda: now[0])
    rounds = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 7 and all(set(one) == set(COSTS) for one in rounds), "one round is untimed"
    for place in range(3):
        assert Counter(one[place] for one in rounds[1:]) == dict.fromkeys(COSTS, 2)
    for name, one in tool.compare_times(seconds, "stock").items():
        assert one["lower_quartile"] == one["ratio"] == one["upper_quartile"] == COSTS[name]


def test_the_ratio_is_the_median_over_rounds(tool):
    compared = tool.compare_times(dict(a=[1.0, 10.0, 100.0], b=[3.0, 20.0, 100.0]), "a")["b"]
    assert compared == dict(ms=20_000, lower_quartile=1.5, ratio=2, upper_quartile=2.5), "no ratio of medians"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux' /proc")
def test_attention(table):
    ours = ["softmax", "dark", "dark-sharp", "performer"]
    rows = table("attention", "--lengths", 65, "--impl", *ours, "--heads", 2, "--head-dim", 8, "--device", "cpu")
    assert [row["impl"] for row in rows] == ours
    assert all(float(row["ms"]) > 0 and float(row["forward_ms"]) > 0 for row in rows)
    assert float(rows[0]["ratio"]) == 1


def test_conditioning(table):
    options = ["--arch", "nano-12", "--size", 32, 48, "--batch", 1, "--mode", "both"]
    rows = {(row["step"], row["form"]): row for row in table("conditioning", *options)}
    trained = [("train", form) for form in ("stock", "identity")]
    assert list(rows) == [*(("inference", form) for form in ("stock", "identity", "folded")), *trained]
    assert len({row["parameters"] for row in rows.values()}) == 1
    assert all(float(row["ratio"]) == 1 for (_, form), row in rows.items() if form == "stock")


@pytest.mark.slow
def test_configs(table, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = ["model.backbone.arch.num_layers=1", "train_dataloader.dataset.num_images=2"]
    rows = table("configs", *CONFIGS, "--cfg-options", *small)
    assert [row["config"] for row in rows] == [Path(config).stem for config in CONFIGS]
    assert float(rows[0]["ratio"]) == 1 and rows[0]["images"] == "(3, 160, 160), (3, 160, 160)"


@pytest.mark.slow
def test_peak_memory_is_that_of_a_process_of_its_own(run_tool, tmp_path):
    out = tmp_path / "overhead.csv"
    options = ["--arch", "nano-12", "--size", 384, 384, "--batch", 1, "--mode", "both", "--rounds", 2, "--threads", 1]
    result = run_tool(f"analysis_tools/{TOOL.name}", "conditioning", *options, "--out", out)
    assert result.returncode == 0, result.stderr
    with out.open() as file:
        peaks = {(row["step"], row["form"]): int(row["peak_mib"]) for row in csv.DictReader(file)}
    for form in ("stock", "identity"):
        assert peaks["train", form] > 1.05 * peaks["inference", form] > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--rounds", "1"], "at least 2 rounds"),
        (["conditioning", "--family", "xcit", "swin", "--arch", "tiny"], "size of one family"),
        (["configs", "none.py"], "no config none.py"),
    ],
)
def test_settings_that_make_no_table_are_refused(tool, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit):
        tool.main()
    assert message in capsys.readouterr().err

"""The table of approximation errors: its rows, that it goes on where it stopped, and its plot."""

import csv
import dataclasses
import importlib.util
import sys

import numpy as np
import pytest
import torch

from mmspectral.analysis import Fit
from tests.helpers import TOOLS

TOOL = TOOLS / "analysis_tools" / "attention_error.py"


@pytest.fixture
def run(monkeypatch):
    spec = importlib.util.spec_from_file_location("attention_error", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    threads = torch.get_num_threads()
    quick = dict(scales=(0.5, 1))
    tool.CALIBRATED = {
        name: options | quick | dict(fit=options["fit"] and dataclasses.replace(options["fit"], steps=2))
        for name, options in ((name, dict(fit=Fit()) | options) for name, options in tool.CALIBRATED.items())
    }

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["attention_error.py", "--seeds", "3", *map(str, arguments)])
        tool.main()
        return tool

    yield main
    torch.set_num_threads(threads)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_estimators_on_synthetic_data(run, tmp_path, capsys):
    out = tmp_path / "errors.csv"
    shape = ["--shape", 2, 3, 24, 8]
    tool = run("--synthetic", 16, 1, *shape, "--features", 16, "--out", out)
    rows = {row["estimator"]: row for row in table(out)}
    assert set(rows) == set(tool.ESTIMATORS)
    for name, row in rows.items():
        assert 0 < float(row["error_q1"]) <= float(row["error_softmax"]) <= float(row["error_q3"]), name
        assert (row["error_own"] == "") == (name in ("uniform", "constant"))
    assert rows["performer"]["ratio_to_performer"] == "1.0000"
    assert rows["performer"]["error_own"] == rows["performer"]["error_softmax"], "M = I is softmax itself"
    assert rows["uniform"]["bias"] == rows["uniform"]["error_softmax"]
    assert float(rows["temperature"]["error_own"]) < float(rows["temperature"]["error_softmax"])
    error, ratio = (f"{float(rows['uniform'][name]):.3f}" for name in ("error_softmax", "ratio_to_performer"))
    assert f"| uniform (3 heads) | {error} / {ratio} / - / {error} |" in capsys.readouterr().out


def test_a_run_goes_on_where_it_stopped(run, tmp_path):
    out = tmp_path / "errors.csv"
    options = ["--synthetic", 16, 1, "--shape", 2, 2, 16, 8, "--out", out, "--estimators", "performer", "uniform"]
    run(*options, "--features", 8)
    first = table(out)
    run(*options, "--features", 8, 16)
    assert table(out)[:2] == first and [row["m"] for row in table(out)] == ["8", "8", "16", "16"]


def test_theorem_3_2_only_where_it_applies(run, tmp_path, capsys):
    out = tmp_path / "errors.csv"
    options = ["--shape", 2, 3, 64, 8, "--features", 8, "--estimators", "theorem-3.2", "--out", out]
    run("--synthetic", 1, 0.8, "--synthetic", 100, 8, *options)
    assert [(row["data"], row["heads"]) for row in table(out)] == [("synthetic 2x3x64x8, condition 1, energy 0.8", "3")]
    assert "theorem-3.2 exists for no head" in capsys.readouterr().err


def test_queries_and_keys_of_a_file(run, tmp_path):
    """Sequences that calibrate are not those that are measured: zeros in them change the calibrated rows alone."""
    generator = np.random.default_rng(0)
    arrays = {f"{name}{i}": generator.normal(size=(3, 2, 20, 4)).astype(np.float16) for name in "qkv" for i in (0, 1)}
    options = ["--features", 8, "--estimators", "performer", "temperature+sharp+shift", "--out"]
    for file in "ab":
        np.savez(tmp_path / f"{file}.npz", **arrays)
        run("--npz", tmp_path / f"{file}.npz", *options, tmp_path / f"{file}.csv")
        for name in ("q0", "k0", "q1", "k1"):
            arrays[name][:2] *= 3
    (performer, calibrated), (same, other) = table(tmp_path / "a.csv"), table(tmp_path / "b.csv")
    assert performer["heads"] == "4" and performer["data"] == f"{tmp_path.name}/a"
    assert performer["error_softmax"] == same["error_softmax"]
    assert calibrated["error_softmax"] != other["error_softmax"]


def test_data_that_is_not_there_is_named(run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("--out", tmp_path / "errors.csv")
    assert "give --npz, --checkpoint or --synthetic" in capsys.readouterr().err
    np.savez(tmp_path / "none.npz", queries=np.ones(3))
    with pytest.raises(SystemExit, match="must hold arrays q0, k0, v0"):
        run("--npz", tmp_path / "none.npz", "--out", tmp_path / "errors.csv")

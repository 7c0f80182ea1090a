"""Comparison of runs over seeds, on the folder of a run of two iterations."""

import shutil

import pytest

from mmspectral.analysis.run_comparison import Run, comparison_table, read_run


def test_reads_a_run(trained_quickstart, tmp_path):
    folder = shutil.copytree(trained_quickstart, tmp_path / "spectral-seed3")
    run = read_run(folder)
    assert (run.group, run.seed) == ("spectral", 3)
    assert 0 <= run.box_ap <= 1 and 0 <= run.mask_ap <= 1
    assert 1 < run.kappa_start < 1.4, "lambda = 10 against weights of std 0.02"
    assert 1 < run.kappa_end < 1.4 and run.kappa_end != run.kappa_start


def test_names_without_a_seed_are_refused(tmp_path):
    with pytest.raises(ValueError, match="-seedN"):
        read_run(tmp_path / "run")


def test_table_gives_mean_and_range_of_each_group():
    runs = [
        Run("stock", 1, 0.2, 0.4, 900.0, 1000.0),
        Run("ours", 0, 0.5, 0.5, 1.1, 1.2),
        Run("stock", 0, 0.4, 0.5, 700.0, 3000.0),
    ]
    table = comparison_table(runs).splitlines()
    assert table[2] == (
        "| stock | 0, 1 | 0.300 (0.200 to 0.400) | 0.450 (0.400 to 0.500) | 800 (700 to 900) | 2000 (1000 to 3000) |"
    )
    assert table[3].startswith("| ours | 0 | 0.500 (0.500 to 0.500)")

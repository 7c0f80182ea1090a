"""The study of conditioning on CIFAR-10: its plan, a run from start to row, its statistics and its report."""

import importlib.util
import itertools
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from scipy import stats

from mmspectral.analysis import attention_projections
from mmspectral.errors import UsageError
from mmspectral.models import SpectralViT
from tests.helpers import CONFIGS, TOOLS, class_folders

SPEC = importlib.util.spec_from_file_location("conditioning_study", TOOLS / "experiments" / "conditioning_study.py")
study = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = study  # where dataclasses look for their annotations
SPEC.loader.exec_module(study)
sys.path.append(str(TOOLS / "experiments"))  # where a run finds its hook

FAMILIES = list(study.CONFIGS)


def row(family, form, seed, accuracy, **rest):
    measured = dict.fromkeys(study.MEASURES, 1.0 + seed)
    return study.Row("a", family, form, seed, accuracy=(0.1, accuracy), cpu_seconds=360.0, **(measured | rest))


def rows(gain=0.0, seeds=3, families=FAMILIES):
    noise = np.random.default_rng(0)
    return [
        row(family, form, seed, round(0.5 + gain * (form != "none") + 0.01 * noise.normal(), 4))
        for seed, family, form in itertools.product(range(seeds), families, ("none", "lambda 1", "lambda 10"))
    ]


def test_plan_is_balanced_and_names_each_run_once():
    runs = study.planned(list(study.PARTS))
    assert len({run.name for run in runs}) == len(runs)
    first = study.planned(["a"])[:75]
    assert [run.seed for run in first] == sorted(run.seed for run in first)
    assert {(run.family, run.form) for run in first[:15]} == set(
        itertools.product(FAMILIES, ("none", "lambda 1", "lambda 10"))
    )


@pytest.mark.parametrize("part", list(study.PARTS))
def test_settings_of_each_run_merge_into_its_config(part, tmp_path):
    for run in {(run.form, run.optimizer, run.images, run.warmup): run for run in study.planned([part])}.values():
        cfg = Config.fromfile(study.write_config(run, tmp_path))
        conditioning = cfg.model.backbone.conditioning
        assert (conditioning is None) == (study.FORMS[run.form] is None)
        assert cfg.optim_wrapper.optimizer.type == run.optimizer
        assert run.lr in (None, cfg.optim_wrapper.optimizer.lr)
        assert cfg.param_scheduler[-1].end == cfg.train_cfg.max_epochs
        assert len(cfg.param_scheduler) == 1 + run.warmup
        assert cfg.randomness.seed == run.seed


@pytest.fixture
def images(tmp_path, monkeypatch):
    for part in ("train", "test"):
        class_folders(tmp_path / "images" / part, [f"class{i}" for i in range(10)], images=8)
    monkeypatch.setenv("MMSPECTRAL_CIFAR", str(tmp_path / "images"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)


TINY = study.Run("toy", "vit", "lambda 10", 0, epochs=1, depth=1)


def test_a_run_ends_in_one_row(images, tmp_path, monkeypatch):
    study.carry_out([TINY], tmp_path, 1, 1)
    (row,) = study.read_rows(tmp_path / "study.csv")
    assert (row.name, row.diverged, len(row.accuracy)) == (TINY.name, False, 1)
    assert row.kappa_wc < 1.2 < row.kappa_w
    assert row.jacobian < 10
    assert 0 < row.entropy < 0.2
    assert row.grad_max >= row.grad_median > 0
    right = study.read_correct(tmp_path / "correct.csv")
    assert right[TINY.name][:80].mean() == pytest.approx(row.accuracy[-1])
    monkeypatch.setattr(study, "train", lambda *_: pytest.fail("trained again"))
    study.carry_out([TINY], tmp_path, None, 1)


@pytest.mark.slow
def test_a_divergence_is_a_result_and_another_failure_is_none(images, tmp_path, monkeypatch):
    diverging = replace(TINY, form="none", optimizer="SGD", lr=1e30)
    study.carry_out([diverging], tmp_path, None, 1)
    (row,) = study.read_rows(tmp_path / "study.csv")
    assert (row.name, row.diverged, row.accuracy) == (diverging.name, True, (0.1,))
    assert row.kappa_w == row.kappa_wc
    monkeypatch.setenv("MMSPECTRAL_CIFAR", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="absent"):
        study.carry_out([TINY], tmp_path, None, 1)
    assert len(study.read_rows(tmp_path / "study.csv")) == 1


def test_a_shifted_start_trains_as_conditioning_does():
    """Weights of the stock model are W + C of the conditioned one after updates with decay at changing rates."""
    from shifted_start import ShiftedStartHook

    conditioning = study.FORMS["lambda 1"]
    arch = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=32)
    models = []
    for given in (conditioning, None):
        torch.manual_seed(0)
        models.append(SpectralViT(arch, img_size=16, patch_size=8, conditioning=given).double())
    runners = [SimpleNamespace(model=m, iter=0, optim_wrapper=torch.optim.AdamW(m.parameters(), 1e-2)) for m in models]
    hook = ShiftedStartHook(conditioning)
    hook.before_train(runners[1])
    for rate in (1e-2, 5e-3, 2e-3):
        images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
        for runner in runners:
            runner.optim_wrapper.param_groups[0].update(lr=rate, weight_decay=0.5)
            runner.optim_wrapper.zero_grad()
            runner.model(images)[0].square().mean().backward()
            runner.optim_wrapper.step()
        hook.after_train_iter(runners[1], 0)
    found = [attention_projections(model)["layers.1.attn.qkv"].matrices()[1] for model in models]
    torch.testing.assert_close(*found, atol=1e-8, rtol=0)


def test_rows_are_read_as_they_were_written(tmp_path):
    written = [row("vit", "none", 0, 0.5, lr=1e-3, diverged=True), row("xcit", "lambda 10 v", 1, 0.25)]
    for one in written:
        study.write_row(tmp_path / "study.csv", one)
    read = study.read_rows(tmp_path / "study.csv")
    assert [one.name for one in read] == [one.name for one in written]
    assert (read[0].accuracy, read[0].lr, read[0].depth, read[0].diverged) == ((0.1, 0.5), 1e-3, None, True)


def test_intervals_are_those_of_scipy():
    differences = [0.01, 0.03, -0.005, 0.02, 0.011]
    found = study.paired_interval(differences)
    expected = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    other = [0.02, -0.03, 0.0, 0.01, 0.04]
    welch = stats.ttest_ind(differences, [-value for value in other], equal_var=False).confidence_interval(0.95)
    pooled = study.pooled_interval([differences, other])  # (mean + mean) / 2 is Welch's difference, halved
    assert (pooled.low, pooled.high) == pytest.approx((welch.low / 2, welch.high / 2))


@pytest.mark.parametrize("gain", [0.0, 0.01])
def test_sign_flips_are_all_of_them(gain):
    noise = np.random.default_rng(1)
    by_family = [list(gain + 0.01 * noise.normal(size=n)) for n in (5, 3, 4)]

    def statistic(flipped):
        return abs(np.mean([np.mean(one) for one in flipped]))

    observed = statistic(by_family)
    flips = itertools.product(*(itertools.product((1, -1), repeat=len(one)) for one in by_family))
    all_of_them = [
        statistic([np.multiply(signs, one) for signs, one in zip(flip, by_family, strict=True)]) >= observed - 1e-12
        for flip in flips
    ]
    assert study.sign_flip_p(by_family) == pytest.approx(np.mean(all_of_them), abs=1e-12)


def test_holm_by_hand():
    assert study.holm([0.04, 0.01]) == pytest.approx([0.04, 0.02])
    assert study.holm([0.03, 0.02]) == pytest.approx([0.04, 0.04])
    assert study.holm([0.9, 0.6]) == [1.0, 1.0]


def test_resampling_covers_the_spread_of_images():
    """With one outcome for all seeds the interval is that of the mean over the images."""
    gain = np.random.default_rng(2).choice([1, 0, -1], size=3000, p=[0.2, 0.7, 0.1]).astype(np.int8)
    low, high = study.resampled_interval({"vit": dict.fromkeys(range(3), gain)})
    half = 1.96 * gain.std() / math.sqrt(3000)
    assert (low, high) == pytest.approx((gain.mean() - half, gain.mean() + half), abs=0.1 * half)


def test_differences_are_of_equal_seeds():
    found = study.paired_differences(
        [row("vit", "none", 0, 0.5), row("vit", "lambda 1", 0, 0.6), row("vit", "lambda 1", 1, 0.9)], "lambda 1"
    )
    assert found == {"vit": {0: pytest.approx(0.1)}}


def test_report_is_the_same_from_the_same_rows_in_any_order(tmp_path):
    texts = []
    for number, order in enumerate((1, -1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "README.md").write_text("before\n" + study.BEGIN + "old\n" + study.END + "after\n")
        others = [row("vit", form, 0, 0.5) for form in list(study.FORMS)[3:]]
        others += [replace(row("vit", form, 0, 0.4), part="b", lr=1e-3) for form in ("none", "lambda 10")]
        for one in (rows(gain=0.05) + others)[::order]:
            study.write_row(folder / "study.csv", one)
        study.report(folder)
        study.report(folder)
        texts.append(
            [(folder / name).read_bytes() for name in ("README.md", "accuracy_lambda.svg", "accuracy_rate.svg")]
        )
    assert texts[0] == texts[1]
    page = texts[0][0].decode()
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert "51 runs, 5.1 CPU hours" in page and "| vit | AdamW, lr 0.001 | lambda 10 | 1 | 40.0 | +0.00 |" in page


def test_page_in_the_repository_is_what_its_rows_give(tmp_path):
    folder = CONFIGS / "cifar"
    if not (folder / "study.csv").is_file():
        pytest.skip("the study has no rows yet")
    for path in folder.iterdir():
        if path.suffix in (".csv", ".md"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    study.report(tmp_path)
    assert (tmp_path / "README.md").read_text() == (folder / "README.md").read_text()
    # Plots are the same bytes for one version of matplotlib only.
    assert {path.name for path in tmp_path.glob("*.svg")} == {path.name for path in folder.glob("*.svg")}

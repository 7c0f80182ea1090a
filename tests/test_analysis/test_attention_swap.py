import csv
import runpy
import sys
from pathlib import Path

import pytest
import torch
from mmengine.logging import MMLogger
from PIL import Image

from mmspectral.analysis.attention_swap import (
    CALIBRATED,
    KERNELS,
    Classifier,
    SwapRow,
    append_row,
    attention_inputs,
    count_spikes,
    diverged,
    load_softmax,
    prepare,
    read_rows,
    swap_and_tune,
)
from mmspectral.analysis.attention_swap_report import markdown_tables, plot_rows
from mmspectral.analysis.dark_calibration import Fit
from mmspectral.analysis.image_training import ImageSet, accuracy, crop_and_flip, load_images, train

ROOT = Path(__file__).resolve().parents[2]
ARCH = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16)
SETTINGS = dict(backbone=dict(arch=ARCH, img_size=8, patch_size=4, out_type="cls_token"), num_classes=2)


def images(count=8, size=8):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    noise = torch.randint(0, 100, (count, 3, size, size), generator=generator)
    return ImageSet((noise + 150 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels, ["dark", "bright"])


@pytest.fixture(autouse=True)
def short_fit(monkeypatch):
    monkeypatch.setitem(CALIBRATED, "dark calibrated", dict(fit=Fit(steps=5)))


@pytest.fixture(scope="module")
def checkpoint():
    torch.manual_seed(0)
    model = Classifier(SETTINGS)
    torch.nn.init.normal_(model.backbone.layers[0].attn.qkv.weight)  # logits that differ
    return dict(settings=SETTINGS, state_dict=model.state_dict())


def test_images_are_shifted_and_flipped_and_nothing_else():
    image = torch.arange(1, 1 + 3 * 6 * 6, dtype=torch.uint8).view(1, 3, 6, 6)
    padded = torch.nn.functional.pad(image[0], (4,) * 4)
    possible = [padded[:, i : i + 6, j : j + 6] for i in range(9) for j in range(9)]
    possible = torch.stack([*possible, *(each.flip(2) for each in possible)])
    changed = crop_and_flip(image.expand(4000, -1, -1, -1), torch.Generator().manual_seed(0))
    same = (changed[:, None] == possible[None]).flatten(2).all(2)  # [4000, 162]
    assert (same.sum(1) >= 1).all() and same.any(0).all()


def test_batches_are_all_images_once_in_order_or_shuffled():
    data = images(8)
    plain = list(data.batches(3))
    assert [len(labels) for _, labels in plain] == [3, 3, 2]
    assert torch.equal(torch.cat([x for x, _ in plain]), data.images.float() / 127.5 - 1)
    shuffled = torch.cat([labels for _, labels in data.batches(3, torch.Generator().manual_seed(0))])
    assert sorted(shuffled.tolist()) == sorted(data.labels.tolist())
    assert sum(len(labels) for _, labels in data.batches(3, torch.Generator(), limit=5)) == 5


def test_training_learns_what_can_be_learned(checkpoint):
    model = load_softmax(checkpoint)
    data = images(32)
    epochs = []
    losses = train(
        model, data, epochs=10, lr=1e-2, generator=torch.Generator().manual_seed(0), after_epoch=epochs.append
    )
    assert losses[-1] < losses[0] / 2 and accuracy(model, data) == 1.0
    assert epochs == list(range(1, 11)) and len(losses) == 10


def test_training_stops_at_a_loss_that_is_not_finite(checkpoint):
    model = load_softmax(checkpoint)
    torch.nn.init.constant_(model.head.bias, torch.inf)
    losses = train(model, images(), epochs=5, lr=1e-3, generator=torch.Generator(), batch_size=4)
    assert len(losses) == 1 and diverged(losses, num_classes=2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_of_softmax_load_under_every_kernel(checkpoint, kernel):
    model = prepare(checkpoint, kernel, None if kernel == "exact" else 4, 0, images())
    for name, value in checkpoint["state_dict"].items():
        assert torch.equal(model.state_dict()[name], value)


def test_softmax_as_a_kernel_is_what_was_trained_and_other_weights_are_refused(checkpoint):
    x = torch.rand(2, 3, 8, 8)
    exact = load_softmax(checkpoint).eval()(x)
    assert torch.equal(load_softmax(checkpoint, dict(type="softmax")).eval()(x), exact)
    assert not torch.allclose(load_softmax(checkpoint, dict(type="uniform")).eval()(x), exact)
    weights = {name: value for name, value in checkpoint["state_dict"].items() if name != "head.bias"}
    with pytest.raises(ValueError, match=r"head\.bias missing"):
        load_softmax(dict(settings=SETTINGS, state_dict=weights))


def test_attention_inputs_are_those_of_the_layer(checkpoint):
    model = load_softmax(checkpoint)
    x = torch.rand(2, 3, 8, 8)
    (inputs,) = attention_inputs(model, x)
    found = {}
    layer = model.backbone.layers[0].attn
    handle = layer.proj.register_forward_hook(lambda module, args, output: found.update(heads=args[0]))
    model.eval()(x)
    handle.remove()
    by_hand = torch.nn.functional.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(by_hand.transpose(1, 2).flatten(2), found["heads"])
    assert not layer.qkv._forward_hooks


def test_calibration_sets_the_geometry_of_each_layer(checkpoint):
    data = images(16)
    calibrated = prepare(checkpoint, "dark calibrated", 8, 0, data, num_images=16).backbone.layers[0].attn.kernel
    assert not torch.equal(calibrated.M, torch.eye(8).expand_as(calibrated.M))
    assert calibrated.shift.any() and (calibrated.proposal_variance != 1).any()
    heat = prepare(checkpoint, "temperature", 8, 0, data, num_images=16).backbone.layers[0].attn.kernel
    assert heat.M.shape == (2,) and heat.shift.any()


def test_limited_regime_leaves_all_but_projections_and_kernel(checkpoint):
    before = checkpoint["state_dict"]
    model = load_softmax(checkpoint, dict(type="dark", num_features=8), "projections")
    train(model, images(), epochs=2, lr=1e-2, generator=torch.Generator().manual_seed(0))
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"backbone.layers.0.attn.qkv.weight", "backbone.layers.0.attn.qkv.bias"}
    assert not torch.equal(after["backbone.layers.0.attn.kernel.M"], torch.eye(8).expand(2, 8, 8))


def test_runs_start_from_one_replaced_model(checkpoint):
    data = images()
    options = dict(study="grid", epochs=2, images_per_epoch=8, batch_size=4)
    runs = [("full", 1e-2), ("limited", 1e-2), ("full", 1e-2)]
    first, limited, again = swap_and_tune(checkpoint, data, data, "performer", 4, 1, runs, **options)
    assert first == again and first.last_loss != limited.last_loss
    assert first.replaced == accuracy(prepare(checkpoint, "performer", 4, 1, data), data)
    assert first.key == ("grid", "performer", 4, "full", 1e-2, 1)


def test_spikes_are_runs_of_steps_above_recent_losses():
    calm = [1 + 0.01 * (-1) ** i for i in range(40)]
    assert count_spikes(calm) == 0
    assert count_spikes([*calm, 1.4, *calm]) == 0  # far from the deviations, below the least height
    assert count_spikes([*calm, 1.6, *calm]) == 1
    assert count_spikes([*calm, 3, 2.5, 3, *calm, 2, *calm]) == 2
    assert count_spikes([*calm, *[3.0] * 20, 3.9]) == 1  # compared with the loss before the spike
    assert count_spikes([9, *calm]) == 0  # nothing to compare with yet
    noisy = [1 + 0.3 * (i % 3 - 1) for i in range(40)]
    assert count_spikes([*noisy, 2.4]) == 0 and count_spikes([*noisy, 2.6]) == 1
    assert count_spikes([*calm, torch.nan]) == 1
    assert diverged([*calm, torch.nan], 10) and diverged([2.4] * 30, 10)
    assert not diverged([*calm, 5.0], 10)


def row(**changes):
    values = dict(study="grid", kernel="performer", num_features=64, regime="full", lr=3e-4, seed=0, replaced=0.25)
    ends = dict(first_epoch=0.5, final=0.75, last_loss=0.1, spikes=0, diverged=False)
    return SwapRow(**{**values, **ends, **changes})


def test_rows_come_back_from_the_file(tmp_path):
    rows = [row(), row(kernel="exact", num_features=None, first_epoch=None, final=None, diverged=True)]
    assert read_rows(tmp_path / "swap.csv") == []
    for each in rows:
        append_row(each, tmp_path / "swap.csv")
    assert read_rows(tmp_path / "swap.csv") == rows


def test_tables_and_plot(tmp_path):
    rows = [
        row(),
        row(seed=1, final=0.85),
        row(kernel="exact", num_features=None, final=0.9),
        row(regime="limited", final=None, diverged=True),
        row(study="sweep", lr=1e-2, spikes=3),
        row(study="sweep", lr=1e-2, seed=1, spikes=1, final=None, diverged=True),
    ]
    full, limited, sweep = markdown_tables(rows).split("\n\n")
    assert full.splitlines()[2] == (
        "| exact | - | 25.0 (25.0 to 25.0) | 50.0 (50.0 to 50.0) | 90.0 (90.0 to 90.0) | 1 |"
    )
    assert "| performer | 64 | 25.0 (25.0 to 25.0) | 50.0 (50.0 to 50.0) | 80.0 (75.0 to 85.0) | 2 |" in full
    assert "| 50.0 (50.0 to 50.0) | - | 1 |" in limited
    assert "| performer | 0.01 | 75.0 (75.0 to 75.0), 1 lost | 4 | 1 | 2 |" in sweep
    for name in ("one.svg", "two.svg"):
        plot_rows(rows, tmp_path / name)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()


def test_command_line(tmp_path, monkeypatch, capsys):
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
        runpy.run_path(str(ROOT / "tools" / "analysis_tools" / "attention_swap.py"), run_name="__main__")
        return capsys.readouterr().out

    where = ["--data", tmp_path, "--checkpoint", tmp_path / "softmax.pth"]
    assert "epoch 1: accuracy" in run("train", *where, "--epochs", 1, "--arch", 16, 1, 2, 16)
    study = [*where, "--csv", tmp_path / "swap.csv", "--epochs", 1, "--images", 4, "--batch-size", 4, "--seeds", 1]
    grid = ["grid", *study, "--kernels", "exact", "performer", "--features", 4, "--regimes", "limited"]
    assert run(*grid).count("SwapRow") == 2
    assert run(*grid) == ""
    sweep = ["sweep", *study, "--kernels", "performer", "--features", 4, "--lrs"]
    assert run(*sweep, 1e-3).count("SwapRow") == 1
    assert run(*sweep, 1e-3, 1e-2).count("SwapRow") == 1
    output = run("report", "--csv", tmp_path / "swap.csv", "--plot", tmp_path / "swap.svg")
    assert "| performer | 4 |" in output and "| performer | 0.01 |" in output
    assert (tmp_path / "swap.svg").exists()
    with (tmp_path / "swap.csv").open() as file:
        assert [line["study"] for line in csv.DictReader(file)] == ["grid", "grid", "sweep", "sweep"]
    assert len(load_images(tmp_path / "train").labels) == 4

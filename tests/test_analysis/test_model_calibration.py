"""Calibration of whole models: which inputs it takes, what it sets in each kind of kernel, and what it refuses."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mmspectral.analysis import calibrate_model, calibration_batches, calibration_table, gather_inputs, write_csv
from mmspectral.analysis.dark_calibration import SCALES, Fit
from mmspectral.layers import RandomFeatureKernel, feature_kernels
from mmspectral.models import DarkViT
from mmspectral.ops.random_features import softmax_attention

BOTH = dict(proposal="sharp", shift="fixed")
FIT = Fit(steps=3)


def vit(kernel, seed=0):
    torch.manual_seed(seed)
    model = DarkViT(
        arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32),
        img_size=32,
        patch_size=8,
        kernel=kernel and dict(dict(num_features=12), **kernel),
    )
    with torch.no_grad():  # attention far from uniform, in few directions
        for layer in model.layers:
            layer.attn.qkv.weight.mul_(torch.linspace(4, 0.5, 16))
    return model


def images(count=4, batch=2, size=32):
    return [torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def test_inputs_are_those_of_exact_softmax():
    """Also of the second layer, whose input depends on the kernel of the first; tokens are a subset of each image."""
    exact, dark = vit(None), vit(dict(type="dark", **BOTH))
    dark.load_state_dict(exact.state_dict(), strict=False)
    expected = []
    for layer in exact.layers:
        layer.attn.qkv.register_forward_hook(lambda *call: expected.append(call[2]))
    batches = images(2)
    for batch in batches:
        exact.eval()(batch)
    got = gather_inputs(dark.train(), batches, dark, num_tokens=100)
    for index, (name, inputs) in enumerate(got.items()):
        assert name == f"layers.{index}.attn.kernel"
        qkv = torch.cat(expected[index::2]).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        for ours, theirs in zip(inputs, qkv, strict=True):
            assert ours.shape == (4, 2, 17, 8)
            torch.testing.assert_close(ours.sum(2), theirs.sum(2))
    assert dark.training
    assert not any(kernel._forward_hooks for kernel in feature_kernels(dark).values())
    sizes = gather_inputs(dark, images(1) + images(1, size=64), dark, num_tokens=256)
    assert [x.shape for x in sizes["layers.1.attn.kernel"]] == [(4, 2, 17, 8)] * 3, "as many tokens as the smallest has"
    few = gather_inputs(dark, batches, dark, num_tokens=5)["layers.0.attn.kernel"]
    all_tokens = got["layers.0.attn.kernel"]
    assert few.q.shape == (4, 2, 5, 8)
    distances = torch.cdist(few.k, all_tokens.k)
    assert (distances.min(-1).values < 1e-6).all() and torch.equal(
        distances.argmin(-1), torch.cdist(few.v, all_tokens.v).argmin(-1)
    )


def error(kernel, inputs):
    """Return the relative error of a kernel against exact softmax, a number."""
    exact = softmax_attention(*inputs)
    return ((kernel(*inputs) - exact).norm() / exact.norm()).item()


def test_every_layer_is_set_to_a_smaller_error(tmp_path):
    model = vit(dict(type="dark", **BOTH))
    kernels = feature_kernels(model)
    pointers = [tensor.data_ptr() for kernel in kernels.values() for tensor in kernel.state_dict().values()]
    inputs = gather_inputs(model, images(), model, num_tokens=17)
    before = [error(kernel, inputs[name]) for name, kernel in kernels.items()]
    rows = calibrate_model(model, images(), fit=FIT)
    assert pointers == [t.data_ptr() for kernel in kernels.values() for t in kernel.state_dict().values()]
    for (name, kernel), row, first in zip(kernels.items(), rows, before, strict=True):
        assert (row.layer, row.num_features) == (name, 12)
        assert 1 < row.effective_rank < 8 and row.condition > 2
        assert row.error_after < row.error_before
        assert error(kernel, inputs[name]) < first
        assert not torch.equal(kernel.M[0], kernel.M[1]) and (kernel.proposal_variance > 1).all()
        torch.testing.assert_close(kernel.redraws, torch.tensor(0))
    again = vit(dict(type="dark", **BOTH))
    assert calibrate_model(again, images(), fit=FIT) == rows, "the result depends on the seed alone"
    assert calibrate_model(again, images(), fit=FIT) == rows, "and not on how the kernels are set"
    table = calibration_table(rows).splitlines()
    assert table[2].startswith(f"| layers.0.attn.kernel | 12 | {rows[0].effective_rank:.1f} |") and len(table) == 5
    write_csv(rows, tmp_path / "rows.csv")
    assert f"layers.1.attn.kernel,12,{rows[1].effective_rank}," in (tmp_path / "rows.csv").read_text()


def test_each_kind_of_kernel_gets_what_it_has():
    temperature = vit(dict(type="temperature", **BOTH))
    calibrate_model(temperature, images(2))
    for kernel in feature_kernels(temperature).values():
        assert kernel.M.shape == (2,) and all(min(abs(t - s) for s in SCALES) < 1e-5 for t in kernel.M.tolist())
        assert kernel.shift.abs().max() > 0
    performer = vit(dict(type="performer", shift="learned"))
    rows = calibrate_model(performer, images(2))
    for (name, kernel), row in zip(feature_kernels(performer).items(), rows, strict=True):
        q, k, _ = gather_inputs(performer, images(2), performer, 17)[name]
        torch.testing.assert_close(kernel.shift.detach(), q.mean((0, 2)) + k.mean((0, 2)))
        assert row.choice == "s = 1, a = 0 (2)"
    low_rank = vit(dict(type="dark", rank=3, **BOTH))
    start = next(iter(feature_kernels(low_rank).values())).M.detach().clone()
    calibrate_model(low_rank, images(2), fit=FIT)
    assert not torch.equal(next(iter(feature_kernels(low_rank).values())).M, start)


@pytest.mark.parametrize("sharing", ["layer", "model"])
def test_heads_that_share_a_matrix(sharing):
    model = vit(dict(type="dark", sharing=sharing, **BOTH))
    rows = calibrate_model(model, images(), fit=FIT)
    first, second = feature_kernels(model).values()
    assert first.M.shape == (1, 8, 8) and not torch.equal(first.M[0], torch.eye(8))
    assert torch.equal(first.M, second.M) == (sharing == "model")
    assert torch.equal(first.proposal_variance[0], first.proposal_variance[1])
    assert (rows[0].error_after == rows[1].error_after) == (sharing == "model")
    assert all(row.error_after < row.error_before for row in rows)


def test_theorem_3_2_where_it_exists():
    kernel = dict(type="dark", proposal="theorem_3_2")
    calm = vit(kernel)
    for layer in calm.layers:
        layer.attn.qkv.weight.data.mul_(0.2)
    calibrate_model(calm, images(2), fit=None)
    for layer in feature_kernels(calm).values():
        assert (layer.proposal_variance > 1).all()
    with pytest.raises(ValueError, match=r"layers\.\d\.attn\.kernel: Theorem 3\.2 needs all eigenvalues"):
        wild = vit(kernel)
        wild.layers[0].attn.qkv.weight.data.mul_(20)
        calibrate_model(wild, images(2), fit=None)


def test_what_cannot_be_calibrated_is_refused():
    for nothing in (None, dict(type="constant"), dict(type="performer")):
        with pytest.raises(ValueError, match=r"no attention over random features .* kernel=dict\(type='dark'"):
            calibrate_model(vit(nothing), images())
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.kernel was not reached: there was no batch"):
        calibrate_model(vit(dict(type="dark")), [])

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = RandomFeatureKernel(2, 8)

        def forward(self, x):
            return self.kernel(x, x, x, torch.ones(1, 5, dtype=torch.bool))

    with pytest.raises(ValueError, match="kernel is called with a mask or causally"):
        calibrate_model(Masked(), [torch.randn(1, 2, 5, 8)])


def draw():
    return torch.rand(()).item(), random.random(), np.random.random()  # noqa: NPY002 - what transforms draw from


def seed_all():
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)


class Noise(torch.utils.data.Dataset):
    """Images that change with every look at them, as augmented ones do."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, *draw()])


def test_batches_depend_on_the_seed_alone():
    loader = DataLoader(Noise(), batch_size=5)
    seed_all()
    expected = draw()
    batches = calibration_batches(loader, 2, batch_size=3)
    seed_all()
    again = calibration_batches(loader, 2, batch_size=3)
    assert draw() == expected, "what follows draws what it would have drawn"
    assert [batch.shape for batch in batches] == [(3, 4), (3, 4)]
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    other = calibration_batches(loader, 2, batch_size=3, seed=1)
    assert not any((a[:, 1:] == b[:, 1:]).any() for a, b in zip(batches, other, strict=True))
    with pytest.raises(ValueError, match="the data set to calibrate on is empty"):
        calibration_batches(DataLoader([], batch_size=1), 1, 1)

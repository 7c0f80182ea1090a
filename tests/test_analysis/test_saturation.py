"""The saturation table: against attention written out by hand, and on the backbones."""

import csv
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mmspectral.analysis import write_csv
from mmspectral.analysis.saturation import (
    ProbedBackbone,
    ProbedLayer,
    SaturationRow,
    identity,
    largest_scale,
    measure_start,
    probe_backbone,
    saturation_rows,
    saturation_table,
)
from mmspectral.layers import build_conditioning, condition_linear, probe_tokens
from mmspectral.models.sites import ConditionedBackbone

ROOT = Path(__file__).resolve().parents[2]
TINY_XCIT = dict(embed_dims=32, depth=4, num_heads=2)
STAGES = dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8])
COLUMNS = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)


class DotProduct(nn.Module):
    """Attention with fused qkv, as ViT has it."""

    def __init__(self, dim=64, num_heads=2, std=0.02):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        nn.init.normal_(self.qkv.weight, std=std, generator=torch.Generator().manual_seed(0))

    def project(self, x):
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, h, N, d]

    def attention_logits(self, x):
        q, k, _ = self.project(x)
        return q @ k.mT / math.sqrt(q.shape[-1])

    def forward(self, x):
        _, _, v = self.project(x)
        return self.proj((self.attention_logits(x).softmax(-1) @ v).transpose(1, 2).flatten(2))


def dot_product(num_tokens=40, **kwargs):
    return ProbedBackbone("dot", {"attn": ProbedLayer(DotProduct(**kwargs).double(), num_tokens)})


@pytest.mark.parametrize("scale", [0, 0.7])
def test_a_start_is_what_attention_by_hand_gives(scale):
    backbone = dot_product()
    layer = backbone.layers["attn"].module
    start = measure_start(backbone.layers["attn"], identity(scale), correlation=0.5)

    x = probe_tokens(40, 64, 0.5).double()[0]
    W = layer.qkv.weight.detach().view(3, 64, 64).clone().requires_grad_()
    q, k, v = (
        (x @ (w + scale * torch.eye(64, dtype=w.dtype)).T + b)
        for w, b in zip(W, layer.qkv.bias.view(3, 64), strict=True)
    )
    heads, entropies, logits = [], [], []
    for h in (slice(0, 32), slice(32, 64)):
        logits.append(q[:, h] @ k[:, h].T / math.sqrt(32))
        attention = logits[-1].exp() / logits[-1].exp().sum(1, keepdim=True)
        entropies.append(-(attention * attention.log()).sum(1))
        heads.append(attention @ v[:, h])
    output = layer.proj(torch.cat(heads, 1))
    cotangent = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output * cotangent[0]).sum().backward()
    assert start.relative_entropy == pytest.approx(torch.stack(entropies).mean().item() / math.log(40), rel=1e-9)
    assert start.largest_logit == pytest.approx(torch.stack(logits).abs().max().item(), rel=1e-9)
    for role, gradient in zip("qkv", W.grad, strict=True):
        assert start.gradients[role] == pytest.approx(gradient.norm().item(), rel=1e-9)
    assert layer.qkv.weight.grad is None and type(layer.qkv) is nn.Linear


def test_rows_are_relative_to_lambda_zero_in_both_forms():
    rows = saturation_rows(dot_product(), [0, 1, 10], [0.0, 0.9], [None, 0.02])
    cases = [(0, None), (1, None), (10, None), (1, 0.02), (10, 0.02)]
    assert [(row.correlation, row.scale, row.preserve_norm) for row in rows] == [
        (c, *x) for c in (0, 0.9) for x in cases
    ]
    assert all(row.gradient_q == row.gradient_k == 1 for row in rows if row.scale == 0)
    one_hot, kept = rows[2], rows[4]
    # The logit of a token with itself is about lambda^2 sqrt(d).
    assert one_hot.largest_logit > 100 * math.sqrt(32) and one_hot.relative_entropy < 1e-6
    assert one_hot.gradient_q < 1e-6 < 0.05 < rows[1].gradient_q
    assert kept.relative_entropy > 0.95


def test_suggested_scale_is_the_largest_that_keeps_the_share():
    backbone = dot_product()
    scale = largest_scale(backbone)

    def entropy(value):
        return measure_start(backbone.layers["attn"], identity(value), 0.5).relative_entropy

    assert 0.1 < scale < 10
    assert entropy(scale) >= 0.5 > entropy(1.13 * scale)
    assert largest_scale(backbone, min_entropy=0.9) < scale
    assert largest_scale(backbone, preserve_norm=0.02) == 100.0
    assert largest_scale(dot_product(std=1.0)) == 0.0


def test_cross_covariance_attention_is_immune():
    (backbone,) = probe_backbone("SpectralXCiT", TINY_XCIT, max_layers=2, image_size=64)
    assert list(backbone.layers) == ["xca_layers.0.attn", "xca_layers.3.attn"]
    assert {layer.num_tokens for layer in backbone.layers.values()} == {16}
    row = saturation_rows(backbone, [10], [0.5])[0]
    assert row.relative_entropy > 0.9 and row.largest_logit <= 1
    assert largest_scale(backbone) == 100.0


@pytest.mark.parametrize(("name", "kinds"), [("SpectralSwin", 1), ("SpectralDaViT", 2), ("SpectralDeiT", 1)])
def test_backbones_give_one_entry_per_kind_of_attention(name, kinds):
    arch = COLUMNS if name == "SpectralDeiT" else STAGES
    state = torch.get_rng_state()
    entries = probe_backbone(name, arch, max_layers=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(entries) == kinds
    plain, conditioned = saturation_rows(entries[0], [0, 10], [0.0])
    assert conditioned.relative_entropy < 0.05 < 0.9 < plain.relative_entropy


def test_table_and_file(tmp_path):
    first = SaturationRow("m", 1.0, None, 0.5, 0.25, 123.4, 0.125, 8.0)
    rows = [first, replace(first, correlation=0.9, relative_entropy=0.5), replace(first, preserve_norm=0.02)]
    rows.append(replace(rows[1], preserve_norm=0.02, relative_entropy=0.25))
    lines = saturation_table(rows).splitlines()
    assert lines[0].startswith("| backbone | lambda | entropy share at correlation 0.5 / 0.9 |")
    assert lines[2] == "| m | 1 | 0.25 / 0.50 | 123 / 123 | 0.12 / 0.12 | 8 / 8 |"
    assert lines[3].startswith("| m | 1, norm kept | 0.25 / 0.25 |") and len(lines) == 4
    write_csv(rows, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(line["preserve_norm"], line["largest_logit"]) for line in read] == [("", "123.4")] * 2 + [
        ("0.02", "123.4")
    ] * 2


@pytest.mark.slow
def test_command_line(run_command, tmp_path):
    script = ROOT / "tools" / "analysis_tools" / "saturation_table.py"
    arguments = ["--backbones", "SpectralXCiT:nano-12", "--scales", "0", "10", "--layers", "1", "--image-size", "64"]
    output = run_command(sys.executable, script, *arguments, "--csv", tmp_path / "table.csv")
    assert "| SpectralXCiT nano-12 | 10 |" in output and "- SpectralXCiT nano-12: 100" in output
    assert "TruncNormal" not in output
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 2 * 3


class DotProductBackbone(ConditionedBackbone, nn.Module):
    probe_length = 40

    def __init__(self, conditioning):
        super().__init__()
        self.attn = DotProduct()
        condition_linear(self.attn, "qkv", build_conditioning(conditioning), ("q", "k", "v"), 2, "[3][heads][d]")
        self.warn_if_saturated()


def test_building_a_backbone_that_starts_one_hot_warns():
    with pytest.warns(UserWarning, match="DotProductBackbone.*attention of attn starts with 0.0 %"):
        DotProductBackbone(identity(10.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harmless in (None, identity(1.0), identity(10.0, 0.02), dict(identity(10.0), targets=["v"])):
            DotProductBackbone(harmless)

"""SpectralSwin against mmpretrain's, mmdet's and timm's Swin, and what detection asks of a backbone."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.models.backbones import SwinTransformer
from mmpretrain.models.utils import ShiftWindowMSA, WindowMSA

from mmspectral.layers import (
    IdentityCorrection,
    attention_layers,
    condition_linear,
    conditioned_projections,
)
from mmspectral.models.attention.window import AnySizeShiftWindowMSA, SpectralWindowMSA
from mmspectral.models.backbones.swin import SpectralSwin
from mmspectral.ops import condition_number
from mmspectral.registry import MODELS

TINY = dict(embed_dims=16, depths=[2, 2, 2], num_heads=[2, 4, 8])
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
BOTH = pytest.mark.parametrize("conditioning", [None, CONDITIONING], ids=["stock", "conditioned"])
# With window 4 and patches of 4: the last map of 64 x 64 is exactly one window.
SIZES = [(64, 64), (65, 90), (128, 72)]
SMALL = [(4, 4), (3, 5), (12, 100), (33, 47), (70, 20)]


def build(**kwargs):
    return SpectralSwin(**(dict(arch=TINY, window_size=4) | kwargs))


def dense(**kwargs):
    return build(**(dict(out_indices=(0, 1, 2)) | kwargs))


def stock_swin(**kwargs):
    return SwinTransformer(**(dict(arch=TINY, window_size=4, out_indices=(2,)) | kwargs))


def forward_backward(model, *size, batch=2):
    outputs = model(torch.randn(batch, 3, *size))
    sum(out.square().mean() for out in outputs).backward()
    return outputs


@pytest.mark.parametrize("size", [*SIZES, *SMALL])
def test_dense_form_is_bit_equal_to_the_swin_of_mmdet(size):
    mmdet_backbones = pytest.importorskip("mmdet.models.backbones")
    torch.manual_seed(0)
    theirs = mmdet_backbones.SwinTransformer(**TINY, strides=(4, 2, 2), window_size=4, out_indices=(0, 1, 2))
    theirs.eval()  # returns None in mmdet
    ours = dense().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, *size)
    assert all(torch.equal(a, b) for a, b in zip(theirs(x), ours(x), strict=True))


def test_classifier_is_stock_by_default_and_the_dense_form_shifts_at_the_window():
    torch.manual_seed(0)
    stock, ours, last_of_dense = stock_swin(), build().eval(), dense().eval()
    stock.eval()  # returns None in mmpretrain
    torch.nn.init.normal_(stock.stages[2].blocks[1].attn.w_msa.relative_position_bias_table)
    ours.load_state_dict(stock.state_dict(), strict=True)
    last_of_dense.load_state_dict(stock.state_dict(), strict=False)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(stock(x)[0], ours(x)[0])
    assert not torch.equal(stock(x)[0], last_of_dense(x)[-1])


def test_outputs_are_described():
    assert (dense().out_channels, dense().out_strides) == ([16, 32, 64], [4, 8, 16])
    after = dense(out_after_downsample=True)
    assert (after.out_channels, after.out_strides) == ([32, 64, 64], [8, 16, 16])
    assert build(out_indices=(-1, 0, 0)).out_indices == (0, 2)
    assert build(out_indices=1).out_indices == (1,)


def test_a_map_smaller_than_the_window_is_padded_with_zeros(adopted):
    torch.manual_seed(0)
    stock = ShiftWindowMSA(12, 2, window_size=4, shift_size=2)
    with pytest.raises(AssertionError, match="smaller than the window"):
        stock(torch.randn(2, 6, 12), (2, 3))
    layer = adopted(AnySizeShiftWindowMSA, stock, None)
    x = torch.randn(2, 2, 3, 12)
    window = torch.zeros(2, 4, 4, 12)
    window[:, :2, :3] = x
    expected = stock.w_msa(window.view(2, 16, 12)).view(2, 4, 4, 12)[:, :2, :3].reshape(2, 6, 12)
    assert torch.equal(layer(x.view(2, 6, 12), (2, 3)), expected)


def test_backbones_that_end_early_load_the_whole_model_and_keep_its_drop_path():
    torch.manual_seed(0)
    whole = dense(drop_path_rate=0.5)
    early = build(out_indices=(1,), drop_path_rate=0.5)
    kept = {name.split(".")[0] + "." + name.split(".")[1] for name in early.state_dict() if name.startswith("stages")}
    assert kept == {"stages.0", "stages.1"}
    assert not [name for name in early.state_dict() if name.startswith(("norm0", "norm2", "stages.1.downsample"))]
    rates = [block.attn.drop.drop_prob for stage in early.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    state = whole.state_dict()
    early.load_state_dict(state, strict=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in early.state_dict().items())
    nested = torch.nn.ModuleDict({"backbone": early})
    nested.load_state_dict({f"backbone.{name}": tensor for name, tensor in state.items()}, strict=True)
    with pytest.raises(RuntimeError, match="stages.0.surplus"):
        early.load_state_dict(state | {"stages.0.surplus": torch.zeros(1)}, strict=True)
    x = torch.randn(1, 3, 40, 40)
    assert torch.equal(early.eval()(x)[0], whole.eval()(x)[1])


def test_stage_settings_cannot_bring_the_reentrant_form_back():
    model = dense(stage_cfgs=dict(with_cp=True)).train()
    loss = model(torch.randn(1, 3, 32, 32))[-1].sum()
    assert torch.autograd.grad(loss, model.patch_embed.projection.weight)[0].isfinite().all()


def test_names_without_weight_decay_are_those_of_timm():
    swin_transformer = pytest.importorskip("timm.models.swin_transformer")
    theirs = swin_transformer.SwinTransformer(img_size=64, embed_dim=16, depths=(2, 2, 2), num_heads=(2, 4, 8))
    expected = {name.replace("layers", "stages").replace("attn.", "attn.w_msa.") for name in theirs.no_weight_decay()}
    assert len(expected) == 6
    assert build().no_weight_decay() == expected
    assert build(use_abs_pos_embed=True).no_weight_decay() == expected | {"absolute_pos_embed"}


def test_pretrained_weights_load_through_init_cfg(tmp_path):
    torch.manual_seed(0)
    classifier = stock_swin()
    torch.save(dict(state_dict={f"backbone.{k}": v for k, v in classifier.state_dict().items()}), tmp_path / "swin.pth")
    model = dense(
        conditioning=CONDITIONING | dict(preserve_function=True),
        pad_small_map=False,
        init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "swin.pth"), prefix="backbone."),
    )
    model.init_weights()
    classifier.eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model.eval()(x)[-1], classifier(x)[0], rtol=1e-4, atol=1e-5)


MILLIONS = {"tiny": 28.3, "small": 49.6, "base": 87.8, "large": 196.5}


@pytest.mark.parametrize("arch", ["tiny", *(pytest.param(a, marks=pytest.mark.slow) for a in list(MILLIONS)[1:])])
def test_every_published_size_has_the_published_parameters(arch):
    """Microsoft's README: 28, 50, 88 and 197 million parameters, with the head of 1,000 classes."""
    model = SpectralSwin(arch=arch, conditioning=CONDITIONING)
    with_head = sum(p.numel() for p in model.parameters()) + 1000 * (model.out_channels[0] + 1)
    assert round(with_head / 1e6, 1) == MILLIONS[arch]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["base", "large"])
def test_published_sizes_with_window_12_run_on_384_pixels(arch):
    """The checkpoints of Swin-B and Swin-L trained on 22,000 classes come with window 7 and window 12."""
    by_argument = SpectralSwin(arch=arch, img_size=384, window_size=12).eval()
    with torch.no_grad():
        assert by_argument(torch.randn(1, 3, 384, 384))[0].shape == (1, by_argument.out_channels[0], 12, 12)


def test_window_12_by_argument_and_by_the_stage_settings_of_mmpretrain_are_the_same():
    by_argument = build(img_size=384, window_size=12)
    by_stage = build(img_size=384, stage_cfgs=dict(block_cfgs=dict(window_size=12)))
    by_stage.load_state_dict(by_argument.state_dict(), strict=True)
    assert by_stage.probe_length == by_argument.probe_length == 144
    assert by_argument.stages[0].blocks[0].attn.w_msa.relative_position_bias_table.shape == (23 * 23, 2)


@pytest.mark.parametrize("out_indices", [(2,), (0, 1, 2)])
def test_equals_timm(out_indices):
    """timm's model with our weights under its names gives the same logits."""
    timm_swin = pytest.importorskip("timm.models.swin_transformer")
    torch.manual_seed(0)
    arch = dict(embed_dims=32, depths=[2, 2, 2], num_heads=[1, 2, 4])
    ours = SpectralSwin(arch=arch, img_size=112, out_indices=out_indices, pad_small_map=False).eval()
    ours.init_weights()
    for name, parameter in ours.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=0.1)
    theirs = timm_swin.SwinTransformer(
        img_size=112, embed_dim=32, depths=(2, 2, 2), num_heads=(1, 2, 4), num_classes=10
    ).eval()
    head = {name: tensor for name, tensor in theirs.state_dict().items() if name.startswith("head.")}
    theirs.load_state_dict(timm_names(ours.state_dict(), last=2) | head, strict=True)
    x = torch.randn(2, 3, 112, 112)
    logits = F.linear(ours(x)[-1].mean((2, 3)), theirs.head.fc.weight, theirs.head.fc.bias)
    torch.testing.assert_close(theirs(x), logits, rtol=1e-4, atol=1e-4)


def timm_names(state, last):
    """Rename to timm's names, which put patch merging at the start of the next stage and one norm at the end."""
    rules = [
        ("patch_embed.projection.", "patch_embed.proj."),
        ("stages.", "layers."),
        (".attn.w_msa.", ".attn."),
        (".ffn.layers.0.0.", ".mlp.fc1."),
        (".ffn.layers.1.", ".mlp.fc2."),
    ]
    renamed = {}
    for name, tensor in state.items():
        if name.endswith("relative_position_index") or name.startswith(tuple(f"norm{i}." for i in range(last))):
            continue
        for ours, theirs in rules:
            name = name.replace(ours, theirs, 1)
        if name.startswith(f"norm{last}."):
            name = name.replace(f"norm{last}.", "norm.")
        if ".downsample." in name:
            _, stage, _, rest = name.split(".", 3)
            name = f"layers.{int(stage) + 1}.downsample.{rest}"
            tensor = official_patch_merging(tensor)
        renamed[name] = tensor
    return renamed


def official_patch_merging(tensor):
    """Reorder the last axis from ``nn.Unfold``'s [C, row, column] of 2 x 2 patches to the official [column, row, C]."""
    return tensor.unflatten(-1, (-1, 2, 2)).transpose(-1, -3).flatten(-3)


def test_position_index_and_bias_of_every_pair():
    torch.manual_seed(0)
    layer = SpectralWindowMSA(8, (2, 3), 2)
    torch.nn.init.normal_(layer.relative_position_bias_table)
    table = layer.relative_position_bias_table.view(3, 5, 2)  # [2 Wh - 1, 2 Ww - 1, h]
    torch.nn.init.zeros_(layer.qkv.weight)
    torch.nn.init.zeros_(layer.qkv.bias)
    logits = layer.attention_logits(torch.randn(1, 6, 8))[0]
    for a in range(6):
        for b in range(6):
            expected = table[a // 3 - b // 3 + 1, a % 3 - b % 3 + 2]
            assert torch.equal(logits[:, a, b], expected)


def test_bias_tables_of_another_window_are_resized():
    timm_layers = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    source, target = build(), build(window_size=6)
    for layer in attention_layers(source).values():
        torch.nn.init.normal_(layer.relative_position_bias_table)
    target.load_state_dict(source.state_dict(), strict=True)
    for name, layer in attention_layers(target).items():
        table = source.get_submodule(name).relative_position_bias_table.detach()
        expected = timm_layers.resize_rel_pos_bias_table_simple(table, (6, 6), (121, table.shape[1]))
        torch.testing.assert_close(layer.relative_position_bias_table.detach(), expected)
        assert torch.equal(layer.relative_position_index, WindowMSA(8, (6, 6), 2).relative_position_index)
    nested = torch.nn.ModuleDict({"backbone": build(window_size=6)})
    nested.load_state_dict({f"backbone.{k}": v for k, v in source.state_dict().items()}, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), nested.parameters(), strict=True))


def windows_reference(layer, x, mask):
    """Logits and output of one window at a time, head by head, in float64 (C on the weight as the paper has it)."""
    D, h = x.shape[-1], layer.num_heads
    d = D // h
    weight = layer.qkv.effective_weight() if hasattr(layer.qkv, "effective_weight") else layer.qkv.weight
    W_q, W_k, W_v = weight.double().view(3, h, d, D)
    b_q, b_k, b_v = layer.qkv.bias.double().view(3, h, d)
    all_logits, outputs = [], []
    for w, tokens in enumerate(x.double()):
        heads, logits = [], []
        for i in range(h):
            q, k, v = (tokens @ W[i].T + b[i] for W, b in ((W_q, b_q), (W_k, b_k), (W_v, b_v)))
            bias = layer.relative_position_bias_table[:, i].double()[layer.relative_position_index]
            logits.append(q @ k.T / math.sqrt(d) + bias + (0 if mask is None else mask[w % len(mask)]))
            heads.append(logits[-1].softmax(-1) @ v)
        outputs.append(F.linear(torch.cat(heads, -1), layer.proj.weight.double(), layer.proj.bias.double()))
        all_logits.append(torch.stack(logits))
    return torch.stack(all_logits), torch.stack(outputs)


def random_layer(**kwargs):
    torch.manual_seed(0)
    layer = SpectralWindowMSA(24, (2, 3), 3, **kwargs)
    torch.nn.init.normal_(layer.relative_position_bias_table)
    return layer


def random_windows():
    mask = torch.zeros(2, 6, 6).masked_fill(torch.rand(2, 6, 6) < 0.3, -100.0)
    return torch.randn(4, 6, 24), mask


@BOTH
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_its_float64_twin(conditioning, masked):
    layer = random_layer(conditioning=conditioning)
    x, mask = random_windows()
    mask = mask if masked else None
    logits, output = windows_reference(layer, x, mask)
    torch.testing.assert_close(layer.attention_logits(x, mask).double(), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x, mask).double(), output, rtol=1e-5, atol=1e-5)


@BOTH
def test_attention_layer_is_a_drop_in(conditioning, adopted):
    torch.manual_seed(0)
    stock = WindowMSA(24, (2, 3), 3)
    torch.nn.init.normal_(stock.relative_position_bias_table)
    ours = MODELS.build(dict(type="mmspectral.SpectralWindowMSA", embed_dims=24, window_size=(2, 3), num_heads=3))
    ours.load_state_dict(stock.state_dict(), strict=True)
    x, mask = random_windows()
    assert torch.equal(stock(x), ours(x))
    assert torch.equal(stock(x, mask=mask), ours(x, mask=mask))
    conditioned = adopted(SpectralWindowMSA, stock, conditioning)
    assert dict(conditioned.named_parameters()).keys() == dict(stock.named_parameters()).keys()
    assert all(p is q for p, q in zip(conditioned.parameters(), stock.parameters(), strict=True))
    assert list(conditioned.state_dict()) == list(stock.state_dict())
    assert not any(tensor.is_meta for tensor in conditioned.state_dict().values())
    copy.deepcopy(conditioned)(x, mask).sum().backward()


def test_adopting_keeps_scale_dropout_and_mode(adopted):
    stock = WindowMSA(24, (2, 3), 3, qkv_bias=False, qk_scale=0.7, attn_drop=0.5, proj_drop=0.5)
    stock.train(False)
    ours = adopted(SpectralWindowMSA, stock, None)
    x, mask = random_windows()
    assert torch.equal(stock(x, mask), ours(x, mask))
    stock.train(), ours.train()
    outputs = []
    for layer in (stock, ours):
        torch.manual_seed(0)
        outputs.append(layer(x, mask))
    assert torch.equal(*outputs)


def test_stock_shifted_windows_take_the_layer():
    layer = ShiftWindowMSA(24, 3, 4, 2, window_msa=SpectralWindowMSA, conditioning=CONDITIONING)
    assert list(conditioned_projections(layer)) == ["w_msa.qkv"]
    assert layer(torch.randn(2, 6 * 7, 24), (6, 7)).shape == (2, 42, 24)


def test_attention_logits_are_what_the_softmax_is_taken_of():
    layer = random_layer(conditioning=CONDITIONING)
    seen = []
    layer.softmax.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x, mask = random_windows()
    layer(x, mask)
    assert torch.equal(seen[0], layer.attention_logits(x, mask))


def test_fused_conditioning_equals_three_separately_conditioned_projections():
    """kappa of each of W_q, W_k, W_v falls; that of the fused matrix is not the criterion."""
    layer = random_layer(conditioning=dict(type="IdentityCorrection", scale=10.0))
    x, _ = random_windows()
    separate = torch.nn.Module()
    outputs = []
    for i, role in enumerate("qkv"):
        linear = torch.nn.Linear(24, 24)
        linear.load_state_dict(
            dict(weight=layer.qkv.weight.chunk(3)[i].detach(), bias=layer.qkv.bias.chunk(3)[i].detach())
        )
        setattr(separate, role, linear)
        condition_linear(separate, role, IdentityCorrection(scale=10.0), (role,), 3, "[3][heads][d]")
        outputs.append(getattr(separate, role)(x))
    torch.testing.assert_close(layer.qkv(x), torch.cat(outputs, -1), rtol=1e-6, atol=1e-5)
    before, after = (
        condition_number(layer.qkv.layout.split(weight))
        for weight in (layer.qkv.weight.detach(), layer.qkv.effective_weight().detach())
    )
    assert (after < 1.3).all() and (before > 10).all()


@pytest.mark.parametrize("cast", [False, True], ids=["autocast", "cast"])
def test_logits_and_softmax_stay_in_float32_in_low_precision(cast):
    layer = random_layer(conditioning=dict(type="IdentityCorrection", scale=10.0))
    x, mask = random_windows()
    if cast:
        layer, x = layer.bfloat16(), x.bfloat16()
    seen = {}
    layer.qkv.register_forward_hook(lambda *args: seen.update(qkv=args[-1]))
    layer.softmax.register_forward_hook(lambda *args: seen.update(logits=args[1][0], attn=args[-1]))
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        assert layer(x, mask).dtype == seen["qkv"].dtype == torch.bfloat16
    assert seen["logits"].dtype == seen["attn"].dtype == torch.float32
    q, k, _ = seen["qkv"].double().view(4, 6, 3, 3, 8).permute(2, 0, 3, 1, 4)
    bias = layer.relative_position_bias_table.double()[layer.relative_position_index].permute(2, 0, 1)
    exact = q @ k.mT / math.sqrt(8) + bias + mask.double().repeat(2, 1, 1).unsqueeze(1)
    torch.testing.assert_close(seen["logits"].double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (dict(arch="huge"), ValueError, "unknown Swin arch 'huge'; choose t, tiny"),
        (dict(arch=dict(embed_dims=16)), ValueError, "embed_dims, depths and num_heads"),
        (dict(out_indices=(3,)), ValueError, r"out_indices \[3\]"),
        (dict(out_indices=()), ValueError, "at least one stage"),
        (dict(frozen_stages=3), ValueError, r"frozen_stages 3 must lie in \[-1, 2\]"),
        (dict(conditioning=dict(type="IdentityCorrection", size=3)), TypeError, "no argument 'size'"),
        (dict(windowsize=8), TypeError, "windowsize"),
    ],
)
def test_errors(kwargs, error, match):
    with pytest.raises(error, match=match):
        build(**kwargs)

"""DarkViT, DarkDeiT and DarkSwin: softmax's names and weights, another kernel, and features that have an owner."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmspectral.checkpoints import FAMILIES, load_backbone
from mmspectral.checkpoints.names import detect, from_mmpretrain, naming_of
from mmspectral.layers import feature_kernels
from mmspectral.models import (
    DarkDeiT,
    DarkMultiheadAttention,
    DarkSwin,
    DarkViT,
    SpectralDeiT,
    SpectralSwin,
    SpectralViT,
)
from mmspectral.registry import MODELS

PLAIN = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64)
STAGES = dict(embed_dims=16, depths=[2, 1, 1], num_heads=[2, 4, 8])
DARK = dict(type="dark", num_features=16)
KERNELS = dict(
    dark=DARK,
    layer=dict(DARK, sharing="layer", rank=3),
    model=dict(DARK, sharing="model"),
    reduced=dict(DARK, proposal="sharp", shift="learned"),
    performer=dict(type="performer", num_features=16),
    temperature=dict(type="temperature", num_features=16),
    learned=dict(type="learned", num_features=16),
    constant=dict(type="constant", num_features=16),
    uniform=dict(type="uniform"),
    softmax=dict(type="mmspectral.softmax"),
)
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
TABLES = ("relative_position_bias_table", "relative_position_index")
# Each with its softmax twin, the settings that give all its maps, and the parts trained in the limited regime.
VIT = (DarkViT, SpectralViT, dict(arch=PLAIN, img_size=(48, 64)), dict(out_type="featmap", out_indices=(0, 1)))
SWIN = (DarkSwin, SpectralSwin, dict(arch=STAGES, window_size=4), dict(out_indices=(0, 1, 2)))
FAMILY = pytest.mark.parametrize("family", [VIT, SWIN], ids=["vit", "swin"])
LIMITED = (".qkv.", ".kernel.", ".cpe.")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(family, kernel=DARK, dense=False, **kwargs):
    cls, _, settings, maps = family
    return cls(**copy.deepcopy(settings | (maps if dense else {}) | dict(kernel=kernel) | kwargs))


def images(*size, batch=2):
    return torch.randn(batch, 3, *(size or (48, 64)))


def loss_of(model, x):
    outputs = [part for out in model(x) for part in (out if isinstance(out, tuple) else (out,))]
    return sum(out.square().mean() for out in outputs)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def randomize(model):
    """Move position convolutions and biases away from zero, where mix-ups would not show."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def redraw(model, counter):
    for kernel in feature_kernels(model).values():
        kernel.redraw(counter)


@pytest.mark.parametrize("conditioning", [None, CONDITIONING], ids=["unconditioned", "conditioned"])
@pytest.mark.parametrize(
    ("classes", "kwargs"),
    [
        ((SpectralViT, DarkViT), dict(out_type="featmap", layer_cfgs=dict(attn_drop_rate=0.1))),
        ((SpectralDeiT, DarkDeiT), dict(distillation=True)),
    ],
    ids=["vit", "deit"],
)
def test_without_a_kernel_a_transformer_is_the_softmax_backbone_bit_by_bit(classes, kwargs, conditioning):
    models = []
    for build_one in (classes[0], partial(classes[1], kernel=None)):
        torch.manual_seed(0)
        models.append(build_one(PLAIN, img_size=(48, 64), conditioning=conditioning, **copy.deepcopy(kwargs)))
        models[-1].init_weights()
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    x = images(33, 50)
    for train in (False, True):
        outputs = []
        for model in models:
            torch.manual_seed(1)
            (first, *_) = model.train(train)(x)
            outputs.append(first if kwargs.get("distillation") else (first,))
        assert same(*outputs)


def softmax_over_maps(model, x):
    """Stock parts of a Swin around an explicit softmax over the whole map."""
    x, (H, W) = model.patch_embed(x)
    outputs = []
    for i, stage in enumerate(model.stages):
        for block in stage.blocks:
            conv = block.cpe.proj
            image = x.transpose(1, 2).unflatten(2, (H, W))
            moved = F.conv2d(image, conv.weight, conv.bias, padding=1, groups=len(image[0]))
            x = x + moved.flatten(2).transpose(1, 2)
            attention = block.attn.w_msa
            q, k, v = attention.qkv(block.norm1(x)).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            x = x + attention.proj((weights @ v).transpose(1, 2).flatten(2))
            x = block.ffn(block.norm2(x), identity=x)
        outputs.append(getattr(model, f"norm{i}")(x).transpose(1, 2).unflatten(2, (H, W)))
        if stage.downsample is not None:
            x, (H, W) = stage.downsample(x, (H, W))
    return outputs


@pytest.mark.parametrize("size", [(40, 56), (5, 70), (33, 33)])
def test_without_a_kernel_a_swin_is_softmax_over_the_whole_map(size):
    model, x = randomize(build(SWIN, None, dense=True)).double().eval(), images(*size).double()
    for ours, explicit in zip(model(x), softmax_over_maps(model, x), strict=True):
        torch.testing.assert_close(ours, explicit, rtol=1e-11, atol=1e-11)


def test_one_window_without_position_bias_is_swin():
    """The tables and indices of windows are left out of what is loaded, at any depth of a model."""
    arch = dict(embed_dims=16, depths=[2], num_heads=[2])
    swin, dark = SpectralSwin(arch, window_size=6).eval(), DarkSwin(arch, kernel=None).eval()
    for block in swin.stages[0].blocks:
        nn.init.zeros_(block.attn.w_msa.relative_position_bias_table)
    state = nn.ModuleDict({"backbone": swin}).state_dict()
    left = nn.ModuleDict({"backbone": dark}).load_state_dict(state, strict=False)
    assert not left.unexpected_keys and all(".cpe.proj." in name for name in left.missing_keys)
    assert not [name for name in dark.state_dict() if name.endswith(TABLES)]
    x = images(24, 24)
    torch.testing.assert_close(dark(x)[0], swin(x)[0])


def test_position_convolutions_start_as_nothing_and_tell_positions_apart():
    model = DarkSwin(dict(embed_dims=16, depths=[2], num_heads=[2]), kernel=dict(type="softmax")).eval()
    model.init_weights()
    x = torch.randn(1, 3, 16, 16)
    shuffled = x.unflatten(2, (4, 4)).unflatten(4, (4, 4))[:, :, torch.tensor([2, 0, 3, 1])].flatten(4).flatten(2, 3)
    before = model(x)[0]
    assert all(not p.any() for n, p in model.named_parameters() if ".cpe." in n)
    torch.testing.assert_close(model(shuffled)[0], before[:, :, [2, 0, 3, 1]], rtol=1e-4, atol=1e-5)
    nn.init.normal_(model.stages[0].blocks[0].cpe.proj.weight)
    assert not torch.allclose(model(shuffled)[0], model(x)[0][:, :, [2, 0, 3, 1]], atol=0.01)


def test_a_kernel_changes_no_other_random_number_and_no_other_name():
    models = []
    for kernel in (None, DARK):
        torch.manual_seed(0)
        models.append(build(VIT, kernel))
        models[-1].init_weights()
    softmax, dark = (model.state_dict() for model in models)
    assert all(torch.equal(dark[name], tensor) for name, tensor in softmax.items())
    own = {f"layers.{i}.attn.kernel.{part}" for i in range(2) for part in ("M", "w", "redraws")}
    assert set(dark) - set(softmax) == own


@FAMILY
def test_every_layer_has_draws_of_its_own_and_one_geometry_if_asked(family):
    kernels = feature_kernels(build(family))
    assert [kernel.layer for kernel in kernels.values()] == list(range(len(kernels)))
    draws = [kernel.w for kernel in kernels.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    assert len({id(kernel.M) for kernel in feature_kernels(build(family, KERNELS["model"])).values()}) == 1
    with pytest.raises(ValueError, match="one shape of M in all layers"):
        build(SWIN, KERNELS["model"], arch=dict(STAGES, num_heads=[2, 2, 2]))


@pytest.mark.parametrize("name", ["dark", "model", "temperature"])
def test_many_features_come_close_to_softmax(name):
    exact, x, errors = build(VIT, None).eval(), images(), []
    for m in (16, 256, 4096):
        model = build(VIT, KERNELS[name] | dict(num_features=m)).eval()
        model.load_state_dict(exact.state_dict(), strict=False)
        errors.append((model(x)[0] - exact(x)[0]).norm().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("trainable", ["all", "projections"])
@pytest.mark.parametrize("name", KERNELS)
@FAMILY
def test_every_trained_parameter_gets_a_gradient(family, name, trainable):
    for form in (dict(), dict(dense=True, conditioning=CONDITIONING), dict(family[3], out_indices=(1,))):
        model = build(family, KERNELS[name], trainable=trainable, **form).train()
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        everything = {n for n, _ in model.named_parameters()}
        limited = {n for n in everything if any(part in n for part in LIMITED)}
        assert trained == (everything if trainable == "all" else limited)
        loss_of(model, images(20, 37)).backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
        assert all(p.grad.any() for n, p in model.named_parameters() if ".cpe.proj.weight" in n)


def test_constant_values_pass_unchanged():
    """The weights of every query sum to one, whatever the features."""
    attention = build(VIT).layers[0].attn
    with torch.no_grad():
        attention.qkv.weight[64:], attention.qkv.bias[64:] = 0, torch.arange(32.0)
    expected = attention.proj(torch.arange(32.0)).expand(2, 13, 32)
    torch.testing.assert_close(attention(torch.randn(2, 13, 32)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("naming", [None, "timm", "official"])
@pytest.mark.parametrize("name", ["dark", "reduced", "learned"])
@FAMILY
def test_softmax_checkpoints_load_and_the_report_names_what_is_new_and_left(family, name, naming, tmp_path):
    torch.manual_seed(1)
    source = family[1](**copy.deepcopy(family[2]))
    own = state = source.state_dict()
    if naming:
        state = from_mmpretrain(state, naming_of(FAMILIES["swin" if family is SWIN else "vit"], naming))
    torch.save(dict(model=state), tmp_path / "softmax.pth")
    model = build(family, KERNELS[name])
    report = load_backbone(model, str(tmp_path / "softmax.pth"))
    new = [n for n in model.state_dict() if ".kernel." in n or ".cpe." in n]
    assert list(report.missing) == new and any(".kernel." in n for n in new)
    assert set(report.unused) == {n for n in own if n.endswith(TABLES[0])} and not report.resized
    assert f"not in the file: {new[0]}" in str(report)
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items() if n not in new)


@pytest.mark.parametrize("naming", [None, "timm", "official", "mmseg"])
def test_dark_checkpoints_keep_their_kernels_under_every_naming(naming, tmp_path):
    torch.manual_seed(1)
    source = build(VIT)
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    redraw(source, 4)
    own = state = source.state_dict()
    if naming:
        state = from_mmpretrain(state, naming_of(FAMILIES["vit"], naming))
        assert detect(state)[1].name in (naming, "timm")
    assert detect(own) == (FAMILIES["vit"], None)
    torch.save(state, tmp_path / "dark.pth")
    model = build(VIT)
    report = load_backbone(model, str(tmp_path / "dark.pth"))
    assert not report.missing and not report.unused and report.share == 1
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())
    with pytest.raises(ValueError, match="DarkViT would compute something else .*layers.0.attn.kernel.M"):
        load_backbone(build(VIT, None), str(tmp_path / "dark.pth"))
    report = load_backbone(build(VIT, None), str(tmp_path / "dark.pth"), min_matched=0.8)
    assert all(".kernel." in n for n in report.unused) and len(report.unused) == 6 and not report.missing


@FAMILY
def test_evaluation_is_deterministic_and_only_training_changes_it(family):
    """Redraws change buffers in place, and outputs only once they are called for."""
    model, x = build(family), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffers = {n: (id(b), b.data_ptr(), b.clone()) for n, b in model.named_buffers()}
    first = model.eval()(x)
    assert same(first, model(x)) and same(first, model.train().eval()(x))
    model.train()
    loss_of(model, x).backward()
    optimizer.step()
    assert all(torch.equal(b, buffers[n][2]) for n, b in model.named_buffers())
    trained = model.eval()(x)
    assert not same(first, trained) and same(trained, model(x))
    redraw(model, 1)
    assert all((id(b), b.data_ptr()) == buffers[n][:2] for n, b in model.named_buffers())
    assert not same(trained, model(x))
    redraw(model, 0)
    assert same(trained, model(x))


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["dark", "reduced", "performer", "learned"])
@FAMILY
def test_half_precision_and_large_queries_and_keys(family, name, dtype, size):
    """q and k as large as float16 holds; near float32 where rounding of q and k allows."""
    model = build(family, KERNELS[name], dense=True).eval()
    with torch.no_grad():
        for module_name, module in model.named_modules():
            if module_name.endswith(".qkv"):
                module.weight[: -module.in_features] *= size
    x = images()
    expected = model(x)
    with torch.autocast("cpu", dtype):
        outputs = model(x)
        loss_of(model, x).backward()
    cast = copy.deepcopy(model).to(dtype)
    assert all(kernel.w.dtype == torch.float32 for kernel in feature_kernels(cast).values()) == (name != "learned")
    for low in (outputs, cast(x.to(dtype))):
        assert all(torch.isfinite(out).all() for out in low)
        assert size > 1 or all((a - b).norm() < 0.03 * b.norm() for a, b in zip(low, expected, strict=True))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_attention_logits_are_those_of_the_kernel():
    attention, x = build(VIT).layers[0].attn, torch.randn(2, 9, 32)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    expected = (attention.attention_logits(x).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x), attention.proj(expected), rtol=1e-4, atol=1e-5)


def test_qk_scale_reaches_the_kernel():
    x = torch.randn(2, 9, 32)
    layers = [DarkMultiheadAttention(32, 4, kernel=DARK, qk_scale=s) for s in (None, 8**-0.5, 0.1)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict(), strict=True)
    first, second, third = (layer(x) for layer in layers)
    assert torch.equal(first, second) and not torch.allclose(first, third)
    built = MODELS.build(dict(type="mmspectral.DarkMultiheadAttention", embed_dims=32, num_heads=4, kernel=DARK))
    assert built(x).shape == (2, 9, 32)


@pytest.mark.parametrize("name", ["dark", "model"])
def test_frozen_stages_hold_in_both_regimes(name):
    for trainable in ("all", "projections"):
        model = build(VIT, KERNELS[name], frozen_stages=1, trainable=trainable).train().train()
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert not any(n.startswith(("layers.0.", "patch_embed", "pos_embed")) for n in trained)
        assert ("layers.1.attn.kernel.M" in trained) == (name == "dark")  # a shared M belongs to block 0
        assert ("layers.1.ln1.weight" in trained) == (trainable == "all")


@pytest.mark.parametrize(
    ("family", "kwargs", "error", "match"),
    [
        (VIT, dict(trainable="none"), ValueError, "trainable must be one of 'all', 'projections'"),
        (SWIN, dict(kernel=dict(type="window")), KeyError, "unknown kernel type 'window'"),
        (VIT, dict(kernel="dark"), TypeError, "kernel must be None or a dict"),
        (VIT, dict(kernel=dict(DARK, rank=9)), ValueError, r"rank must be an integer in \[1, 8\]"),
        (VIT, dict(layer_cfgs=dict(attn_drop_rate=0.1)), ValueError, "at rate 0.1 needs .* matrix"),
        (SWIN, dict(stage_cfgs=dict(block_cfgs=dict(attn_cfgs=dict(attn_drop=0.2)))), ValueError, "Swin: attn_drop"),
    ],
)
def test_errors(family, kwargs, error, match):
    with pytest.raises(error, match=match):
        build(family, **kwargs)
    with pytest.raises(TypeError, match="kernel"):
        family[0](**copy.deepcopy(family[2]))


def test_wide_heads_may_have_a_rank_above_64():
    arch = dict(PLAIN, embed_dims=96, num_heads=1)
    assert DarkViT(arch, img_size=32, kernel=dict(DARK, rank=80)).layers[0].attn.kernel.M.shape == (1, 80, 96)

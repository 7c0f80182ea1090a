"""SpectralDaViT against mmpretrain's DaViT, timm's, and what detection asks of a backbone."""

import copy
import re

import numpy as np
import pytest
import torch
from mmpretrain.models.backbones import DaViT
from mmpretrain.models.backbones.davit import ChannelAttention, DaViTDownSample, DaViTWindowMSA
from torch import nn

from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.layers import attention_layers, conditioned_projections, fold, probe_tokens, saturation, unfold
from mmspectral.models.attention.channel import SpectralChannelAttention
from mmspectral.models.backbones import SpectralDaViT
from mmspectral.models.davit_layers import AnySizeDownSample, SpectralDaViTWindowMSA
from mmspectral.registry import MODELS

TINY = dict(embed_dims=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8])
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
BOTH = pytest.mark.parametrize("conditioning", [None, CONDITIONING], ids=["stock", "conditioned"])
SIZES = [(4, 4), (32, 32), (33, 47), (70, 90), (8, 200)]
OFFICIAL = dict(stem_padding=3, gap_before_final_norm=True)


def build(conditioning=None, **kwargs):
    kwargs.setdefault("arch", TINY)
    kwargs.setdefault("channel_conditioning", conditioning)
    return SpectralDaViT(conditioning=conditioning, **kwargs)


def dense(conditioning=None, **kwargs):
    return build(conditioning, **{"out_indices": (0, 1, 2, 3), **kwargs})


def forward_backward(model, *size, batch=2):
    outputs = model(torch.randn(batch, 3, *size))
    sum(out.square().mean() for out in outputs).backward()
    return outputs


def without_gradient(model):
    return [name for name, p in model.named_parameters() if p.grad is None]


def shake(model):
    """Move every parameter off its initial value, so that a mixed-up norm or bias shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("indices", [(3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("size", [(32, 64), (64, 224), (96, 96)])
def test_conditioning_off_is_bit_equal_to_stock(size, indices):
    settings = dict(arch=TINY, out_indices=indices, drop_path_rate=0.5)
    torch.manual_seed(0)
    stock = DaViT(**settings, pad_small_map=True)
    torch.manual_seed(0)
    ours = build(**settings)
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True))
    shake(stock)
    ours.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, *size)
    for train in (False, True):
        outputs = []
        for model in (stock, ours):
            model.train(train)  # returns None in mmpretrain
            torch.manual_seed(1)
            outputs.append(model(x))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    for outs in outputs:
        sum(out.square().mean() for out in outs).backward()
    expected = dict(stock.named_parameters())
    assert without_gradient(ours) == []
    assert [n for n, p in ours.named_parameters() if not torch.equal(p.grad, expected[n].grad)] == []


def test_small_maps_are_refused_on_request_as_in_stock():
    with pytest.raises(AssertionError, match="smaller than the window"):
        dense(pad_small_map=False)(torch.randn(1, 3, 32, 32))


def test_conditioning_changes_the_function_and_nothing_else():
    torch.manual_seed(0)
    stock, ours = build().eval(), build(CONDITIONING).eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in stock.named_parameters()}
    x = torch.randn(2, 3, 32, 48)
    assert (ours(x)[0] - stock(x)[0]).norm() > 0.1 * stock(x)[0].norm()
    blocks = [f"stages.{i}.blocks.{j}" for i, depth in enumerate(TINY["depths"]) for j in range(depth)]
    windows = [f"{block}.spatial_block.attn.w_msa.qkv" for block in blocks]
    channels = [f"{block}.channel_block.attn.qkv" for block in blocks]
    assert set(conditioned_projections(ours)) == {*windows, *channels}
    assert list(conditioned_projections(SpectralDaViT(arch=TINY, conditioning=CONDITIONING))) == windows
    assert list(conditioned_projections(SpectralDaViT(arch=TINY, channel_conditioning=CONDITIONING))) == channels


def test_fold_and_unfold_keep_the_function():
    ours = dense(CONDITIONING).double().eval()
    x = torch.randn(1, 3, 40, 56, dtype=torch.float64)
    before = ours(x)
    sites = fold(ours)
    stock = dense().double().eval()
    stock.load_state_dict(ours.state_dict(), strict=True)
    unfold(ours, sites)
    for a, b, c in zip(before, stock(x), ours(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)


@BOTH
@pytest.mark.parametrize("size", SIZES)
def test_any_size_and_every_parameter_gets_a_gradient(conditioning, size):
    """users.md D4 and E1; maps of (4, 4) are a single position in every stage."""
    for indices in ((0, 1, 2, 3), (1,)):
        model = build(conditioning, out_indices=indices).train()
        outputs = forward_backward(model, *size)
        described = (model.out_channels, model.out_strides)
        expected = [(2, c, *(-(-side // s) for side in size)) for c, s in zip(*described, strict=True)]
        assert [tuple(out.shape) for out in outputs] == expected
        assert without_gradient(model) == []
    classifier = build(conditioning, **OFFICIAL).train()
    (pooled,) = forward_backward(classifier, *size)
    assert pooled.shape == (2, 128)
    assert without_gradient(classifier) == []


def test_outputs_are_described():
    """users.md B6."""
    assert build(arch=dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2])).out_channels == [32]
    model = dense(out_indices=(2, 0))
    assert model.out_indices == (0, 2)
    assert (model.out_channels, model.out_strides) == ([16, 64], [4, 16])
    assert (build(out_indices=-2).out_channels, build(patch_size=2).out_strides) == ([64], [16])


def test_a_classifiers_weights_load_into_every_form(tmp_path):
    torch.manual_seed(0)
    classifier = shake(build(out_indices=(3,))).eval()
    saved = {f"backbone.{name}": tensor for name, tensor in classifier.state_dict().items()}
    torch.save(dict(state_dict=saved), tmp_path / "classifier.pth")
    model = build(
        out_indices=(1, 2), init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "classifier.pth"))
    ).eval()
    model.init_weights()
    own = classifier.state_dict()
    fresh = {name for name in model.state_dict() if name not in own}
    assert fresh == {f"norm{i}.{leaf}" for i in (1, 2) for leaf in ("weight", "bias")}
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items() if name not in fresh)

    everything = dense()
    everything.load_state_dict(dict(dense().state_dict(), **own), strict=True)
    for indices in ((3,), (1,), (0, 2)):
        part = build(out_indices=indices)
        part.load_state_dict(everything.state_dict(), strict=True)
        nn.ModuleDict({"backbone": part}).load_state_dict(
            {f"backbone.{name}": tensor for name, tensor in everything.state_dict().items()}, strict=True
        )
        x = torch.randn(1, 3, 32, 32)
        outputs = everything.eval()(x)
        assert all(torch.equal(a, outputs[i]) for a, i in zip(part.eval()(x), indices, strict=True))


@pytest.mark.parametrize("n", range(-1, 5))
def test_frozen_stages_freeze_the_stem_and_exactly_the_stages_up_to_n(n):
    """users.md E3. The count is mmpretrain's, where 3 is the largest that runs."""
    model = dense(frozen_stages=n)
    before = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert model.train() is model
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == before  # an optimizer is built before the first train()
    assert {".".join(name.split(".")[:2]) for name in frozen if name.startswith("stages")} == {
        f"stages.{i}" for i in range(min(n + 1, 4))
    }
    assert {name for name, _ in model.named_parameters() if name.startswith(("patch_embed", "norm"))} & set(frozen) == {
        name
        for name, _ in model.named_parameters()
        if (name.startswith("patch_embed") and n >= 0) or (name.startswith("norm") and int(name[4]) <= n)
    }
    assert [stage.training for stage in model.stages] == [i > n for i in range(4)]
    if n < 3:
        forward_backward(model, 32, 32)
        assert without_gradient(model) == frozen
    if n < 4:
        stock = DaViT(arch=TINY, out_indices=(0, 1, 2, 3), frozen_stages=n)
        stock.train()
        assert frozen == [name for name, p in stock.named_parameters() if not p.requires_grad]


@BOTH
def test_checkpointing_gives_the_same_gradients(conditioning):
    """users.md D5; on two ranks: tests/test_engine."""
    torch.manual_seed(0)
    plain = dense(conditioning, drop_path_rate=0.5).train()
    recomputed = dense(conditioning, drop_path_rate=0.5, with_cp=True).train()
    recomputed.load_state_dict(plain.state_dict())
    calls = []
    for block in recomputed.stages[2].blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 3, 32, 40)
    grads = []
    for model in (plain, recomputed):
        torch.manual_seed(1)
        loss = sum(out.square().mean() for out in model(x))
        grads.append(torch.autograd.grad(loss, list(model.parameters())))  # refuses the reentrant form
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert len(calls) == 4  # the two blocks ran again in the backward pass
    with torch.no_grad():
        recomputed(x)


def test_compiles_into_one_graph_with_numpy_rates():
    arch = dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2])
    rates = [dict(drop_paths=list(np.linspace(0.1, 0.3, depth))) for depth in arch["depths"]]
    model = build(CONDITIONING, arch=arch, out_indices=(0, 1), stage_cfgs=rates).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(2, 3, 33, 40)
    outputs = []
    for run in (model, compiled):
        torch.manual_seed(0)
        outputs.append(run(x))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_layer_depth_grows_with_depth_and_covers_every_parameter_of_a_detector():
    """users.md E4."""
    model = dense()
    detector = nn.ModuleDict({"backbone": model, "neck": nn.Conv2d(1, 1, 1), "stages": nn.Linear(1, 1)})
    depths = {name: model.get_layer_depth(name, "backbone.") for name, _ in detector.named_parameters()}
    assert {total for _, total in depths.values()} == {5 + 2}
    depths = {name: depth for name, (depth, _) in depths.items()}
    assert {depth for name, depth in depths.items() if "patch_embed" in name} == {0}
    blocks = [(i, j) for i, depth in enumerate(TINY["depths"]) for j in range(depth)]
    for depth, (i, j) in enumerate(blocks, start=1):
        assert {d for n, d in depths.items() if n.startswith(f"backbone.stages.{i}.blocks.{j}.")} == {depth}
    assert [depths[f"backbone.stages.{i}.downsample.projection.weight"] for i in range(3)] == [1, 2, 4]
    assert {depths[n] for n in depths if n.startswith(("backbone.norm", "neck", "stages"))} == {6}
    forward_order = [depth for name, depth in depths.items() if name.startswith(("backbone.patch", "backbone.stages"))]
    assert forward_order == sorted(forward_order)
    assert build(out_indices=(1,)).get_layer_depth("norm1.weight") == (3, 4)


def test_nothing_is_named_free_of_weight_decay():
    assert build().no_weight_decay() == set()
    assert not any(re.search("pos_embed|bias_table", name) for name, _ in build().named_parameters())


def test_init_statistics():
    torch.manual_seed(0)
    model = build(CONDITIONING, arch=dict(TINY, embed_dims=32))
    model.init_weights()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.numel() > 10000:
            assert abs(module.weight.std() - 0.02) < 0.002, name
        if isinstance(module, nn.Linear):
            assert not module.bias.any(), name


@pytest.mark.parametrize(
    ("arch", "parameters"),
    [
        ("tiny", 28_360_168),
        pytest.param("small", 49_745_896, marks=pytest.mark.slow),
        pytest.param("base", 87_954_408, marks=pytest.mark.slow),
    ],
)
def test_published_sizes_have_the_official_number_of_parameters(arch, parameters):
    model = SpectralDaViT(arch=arch)
    assert sum(p.numel() for p in model.parameters()) + 1000 * (model.out_channels[0] + 1) == parameters


@pytest.fixture(scope="module")
def timm_twins():
    """A classifier of ours (a backbone and a linear head) and timm's model with its weights."""
    davit = pytest.importorskip("timm.models.davit")
    torch.manual_seed(0)
    ours = shake(build(**OFFICIAL)).eval()
    head = nn.Linear(128, 10)
    theirs = davit.DaVit(
        depths=tuple(TINY["depths"]), embed_dims=(16, 32, 64, 128), num_heads=tuple(TINY["num_heads"]), num_classes=10
    ).eval()
    state = from_mmpretrain(ours.state_dict(), naming_of(FAMILIES["davit"], "timm"))
    state.update({f"head.fc.{name}": tensor for name, tensor in head.state_dict().items()})
    theirs.load_state_dict(state, strict=True)
    return ours, head, theirs


@pytest.mark.parametrize("size", [(224, 224), *SIZES])
def test_equals_timm(timm_twins, size):
    """users.md E19: timm's model with our weights under its names gives the same logits and features."""
    ours, head, theirs = timm_twins
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(head(ours(x)[0]), theirs(x), rtol=1e-4, atol=1e-4)
    features = dense(norm_cfg=None, stem_padding=3).eval()
    state = {name: tensor for name, tensor in ours.state_dict().items() if not name.startswith("norm3")}
    features.load_state_dict(state, strict=True)
    expected = theirs.forward_intermediates(x, intermediates_only=True)
    for a, b in zip(features(x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_official_form_is_another_function_than_mmpretrains(timm_twins):
    """Why the two arguments exist: with either at mmpretrain's value the logits are not timm's."""
    ours, head, theirs = timm_twins
    x = torch.randn(2, 3, 64, 64)
    for settings in (dict(gap_before_final_norm=True), dict(stem_padding=3)):
        other = build(**settings).eval()
        other.load_state_dict(ours.state_dict(), strict=True)
        out = other(x)[0]
        logits = head(out if out.ndim == 2 else out.mean(dim=(2, 3)))
        assert (logits - theirs(x)).norm() > 1e-2 * theirs(x).norm()


def channel_attention_reference(x, weights, biases, proj, num_heads, scale):
    """The float64 twin: three separate projections, one head and one image at a time."""
    outputs = []
    for tokens in x:
        q, k, v = (tokens @ weight.T + bias for weight, bias in zip(weights, biases, strict=True))
        heads = []
        for rows in torch.arange(x.shape[-1]).chunk(num_heads):
            attention = (scale * k[:, rows].T @ v[:, rows]).softmax(dim=-1)
            heads.append(torch.einsum("ij,nj->ni", attention, q[:, rows]))
        outputs.append(torch.cat(heads, dim=-1))
    return proj(torch.stack(outputs))


@pytest.mark.parametrize("targets", [("q", "k", "v"), ("q",), ("k", "v")])
@pytest.mark.parametrize("layer_type", ["channel", "window"])
def test_fused_conditioning_is_that_of_three_separate_projections(targets, layer_type):
    """users.md E17."""
    torch.manual_seed(0)
    settings = dict(type="IdentityCorrection", scale=3.0, targets=targets)
    if layer_type == "channel":
        layer = SpectralChannelAttention(24, 3, qkv_bias=True, conditioning=settings).double()
    else:
        layer = SpectralDaViTWindowMSA.from_stock(DaViTWindowMSA(24, (3, 5), 3), settings).double()
    weights = [
        weight + 3.0 * (role in targets) * torch.eye(24, dtype=torch.float64)
        for role, weight in zip("qkv", layer.qkv.weight.chunk(3), strict=True)
    ]
    biases = layer.qkv.bias.chunk(3)
    x = torch.randn(2, 15, 24, dtype=torch.float64)
    if layer_type == "channel":
        expected = channel_attention_reference(x, weights, biases, layer.proj, 3, 8**-0.5)
    else:
        split = [(x @ w.T + b).unflatten(-1, (3, 8)).transpose(1, 2) for w, b in zip(weights, biases, strict=True)]
        attended = nn.functional.scaled_dot_product_attention(*split)
        expected = layer.proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-11, atol=1e-11)
    for role, block, stock in zip("qkv", layer.qkv.effective_weight().chunk(3), layer.qkv.weight.chunk(3), strict=True):
        kappa, bare = torch.linalg.cond(block), torch.linalg.cond(stock)
        assert kappa < 2 < bare if role in targets else kappa == bare


@pytest.mark.parametrize("layer_type", ["channel", "window"])
def test_layers_are_drop_ins(layer_type):
    torch.manual_seed(0)
    x = torch.randn(6, 49, 24)
    if layer_type == "channel":
        stock = ChannelAttention(24, 3, qkv_bias=True)
        ours = MODELS.build(dict(type="mmspectral.SpectralChannelAttention", embed_dims=24, num_heads=3, qkv_bias=True))
        conditioned = SpectralChannelAttention.from_stock(stock, CONDITIONING)
        inputs = (x,)
    else:
        stock = DaViTWindowMSA(24, (7, 7), 3, qk_scale=0.4)
        ours = SpectralDaViTWindowMSA(24, (7, 7), 3, qk_scale=0.4)
        conditioned = SpectralDaViTWindowMSA.from_stock(stock, CONDITIONING)
        inputs = (x, -100.0 * torch.randint(2, (3, 49, 49)))
        assert torch.equal(stock(x), SpectralDaViTWindowMSA.from_stock(stock, None)(x))
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert torch.equal(stock(*inputs), ours(*inputs))
    assert conditioned.qkv.weight is stock.qkv.weight
    assert list(conditioned.state_dict()) == list(stock.state_dict())
    copied = copy.deepcopy(conditioned)
    copied(*inputs).sum().backward()
    assert without_gradient(copied) == []


def test_attention_logits_are_what_the_softmax_is_taken_of():
    torch.manual_seed(0)
    model = build(CONDITIONING)
    layers = attention_layers(model)
    assert len(layers) == 2 * sum(TINY["depths"])
    x = torch.randn(2, 49, 16)
    channel, window = model.stages[0].blocks[0].channel_block.attn, model.stages[0].blocks[0].spatial_block.attn.w_msa
    assert channel.attention_logits(x).shape == (2, 1, 16, 16)
    assert window.attention_logits(x).shape == (2, 1, 49, 49)
    for layer, roles in ((channel, (1, 2, 0)), (window, (0, 1, 2))):
        rows, columns, values = (layer.qkv(x).chunk(3, dim=-1)[i] for i in roles)
        attn = layer.attention_logits(x).softmax(dim=-1)[:, 0]
        if layer is channel:
            rows, columns, values = rows.mT, columns.mT, values.mT
        torch.testing.assert_close(attn, (0.25 * rows @ columns.mT).softmax(dim=-1))
        out = attn @ values
        torch.testing.assert_close(layer.proj(out.mT if layer is channel else out), layer(x))


def test_half_precision_keeps_logits_and_softmax_in_float32():
    """A sum over the 4096 tokens of a detector's map exceeds the range of float16; stock gives nan there."""
    torch.manual_seed(0)
    stock = ChannelAttention(16, 2)
    with torch.no_grad():
        stock.qkv.weight.copy_(torch.eye(16).repeat(3, 1))
    ours = SpectralChannelAttention.from_stock(stock, None)
    x = 8 + torch.randn(1, 4096, 16)
    exact = ours(x)
    stock.half(), ours.half()
    assert not stock(x.half()).isfinite().all()
    low = ours(x.half())
    assert low.dtype == torch.float16
    assert ours.attention_logits(x.half()).dtype == torch.float32
    assert (low.float() - exact).norm() < 1e-2 * exact.norm()


def test_logits_are_float32_under_autocast():
    model = dense(CONDITIONING)
    with torch.autocast("cpu", torch.bfloat16):
        for layer in attention_layers(model).values():
            assert layer.attention_logits(torch.randn(1, 49, layer.embed_dims)).dtype == torch.float32


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7), (5, 7), (1, 1)])
def test_downsampling_pads_the_map(size):
    """Even sides: stock's bits. Others: a map padded with zeros after the norm."""
    torch.manual_seed(0)
    stock = DaViTDownSample(8, 16, norm_cfg=dict(type="LN"))
    ours = AnySizeDownSample.from_stock(stock)
    H, W = size
    x = torch.randn(2, H * W, 8)
    out, out_size = ours(x, size)
    assert out_size == ((H + 1) // 2, (W + 1) // 2)
    if H % 2 == W % 2 == 0:
        assert torch.equal(out, stock(x, size)[0])
    padded = torch.zeros(2, 8, H + H % 2, W + W % 2)
    padded[:, :, :H, :W] = stock.norm(x).mT.reshape(2, 8, H, W)
    torch.testing.assert_close(out, stock.projection(padded).flatten(2).mT)


def relative_entropy(tokens, dim, scale, targets=("q", "k", "v"), **settings):
    torch.manual_seed(0)
    conditioning = dict(type="IdentityCorrection", scale=scale, targets=targets, **settings)
    layer = SpectralChannelAttention(dim, dim // 32, conditioning=conditioning)
    nn.init.trunc_normal_(layer.qkv.weight, std=0.02)
    with torch.no_grad():
        return saturation(layer.attention_logits(probe_tokens(tokens, dim, correlation=0.5))).relative_entropy


def test_channel_attention_saturates_unless_only_q_is_conditioned():
    """The table in the docstring of SpectralChannelAttention, and why channel_conditioning is None by default."""
    first, last = dict(tokens=3136, dim=96), dict(tokens=49, dim=768)
    measured = [
        [relative_entropy(**stage, **settings) for settings in (dict(scale=0.0), dict(scale=1.0), dict(scale=10.0))]
        + [relative_entropy(**stage, scale=10.0, preserve_norm=0.02)]
        for stage in (first, last)
    ]
    assert measured[0] == pytest.approx([0.31, 0.004, 0.0, 0.07], abs=0.015)
    assert measured[1] == pytest.approx([0.81, 0.32, 0.001, 0.78], abs=0.015)
    assert relative_entropy(**first, scale=10.0, targets=("q",)) == measured[0][0]


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (dict(arch="micro"), ValueError, "unknown DaViT arch 'micro'; choose t, tiny"),
        (dict(arch=dict(embed_dims=16)), ValueError, "lacks depths, num_heads"),
        (dict(out_indices=(4,)), ValueError, "there are 4 stages"),
        (dict(out_indices=()), ValueError, "out_indices"),
        (dict(frozen_stages=5), ValueError, "frozen_stages 5 must lie in"),
        (dict(out_after_downsample=True), ValueError, "out_after_downsample"),
        (dict(channel_conditioning=dict(type="IdentityCorrection", size=3)), TypeError, "no argument 'size'"),
        (dict(windowsize=8), TypeError, "windowsize"),
    ],
)
def test_errors(kwargs, error, match):
    with pytest.raises(error, match=match):
        build(**kwargs)

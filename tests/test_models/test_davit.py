"""SpectralDaViT against mmpretrain's DaViT, timm's, and what detection asks of a backbone."""

import copy

import pytest
import torch
from mmpretrain.models.backbones.davit import ChannelAttention, DaViTDownSample, DaViTWindowMSA
from torch import nn

from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.layers import attention_layers, conditioned_projections, probe_tokens, saturation
from mmspectral.models.attention.channel import SpectralChannelAttention
from mmspectral.models.attention.window import SpectralDaViTWindowMSA
from mmspectral.models.backbones import SpectralDaViT
from mmspectral.models.backbones.davit import AnySizeDownSample
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


def test_outputs_are_described():
    assert build(arch=dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2])).out_channels == [32]
    model = dense(out_indices=(2, 0))
    assert model.out_indices == (0, 2)
    assert (model.out_channels, model.out_strides) == ([16, 64], [4, 16])
    assert (build(out_indices=-2).out_channels, build(patch_size=2).out_strides) == ([64], [16])


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
    """timm's model with our weights under its names gives the same logits and features."""
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
def test_fused_conditioning_is_that_of_three_separate_projections(targets, layer_type, adopted):
    torch.manual_seed(0)
    settings = dict(type="IdentityCorrection", scale=3.0, targets=targets)
    if layer_type == "channel":
        layer = SpectralChannelAttention(24, 3, qkv_bias=True, conditioning=settings).double()
    else:
        layer = adopted(SpectralDaViTWindowMSA, DaViTWindowMSA(24, (3, 5), 3), settings).double()
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
def test_layers_are_drop_ins(layer_type, adopted):
    torch.manual_seed(0)
    x = torch.randn(6, 49, 24)
    if layer_type == "channel":
        stock = ChannelAttention(24, 3, qkv_bias=True)
        ours = MODELS.build(dict(type="mmspectral.SpectralChannelAttention", embed_dims=24, num_heads=3, qkv_bias=True))
        conditioned = adopted(SpectralChannelAttention, stock, CONDITIONING)
        inputs = (x,)
    else:
        stock = DaViTWindowMSA(24, (7, 7), 3, qk_scale=0.4)
        ours = SpectralDaViTWindowMSA(24, (7, 7), 3, qk_scale=0.4)
        conditioned = adopted(SpectralDaViTWindowMSA, stock, CONDITIONING)
        inputs = (x, -100.0 * torch.randint(2, (3, 49, 49)))
        assert torch.equal(stock(x), adopted(SpectralDaViTWindowMSA, stock, None)(x))
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


def test_half_precision_keeps_logits_and_softmax_in_float32(adopted):
    """A sum over the 4096 tokens of a detector's map exceeds the range of float16; stock gives nan there."""
    torch.manual_seed(0)
    stock = ChannelAttention(16, 2)
    with torch.no_grad():
        stock.qkv.weight.copy_(torch.eye(16).repeat(3, 1))
    ours = adopted(SpectralChannelAttention, stock, None)
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
def test_downsampling_pads_the_map(size, adopted):
    """Even sides: stock's bits. Others: a map padded with zeros after the norm."""
    torch.manual_seed(0)
    stock = DaViTDownSample(8, 16, norm_cfg=dict(type="LN"))
    ours = adopted(AnySizeDownSample, stock)
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

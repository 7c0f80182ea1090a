"""DarkAttention: timm's attention with another kernel, grouped, to a context, and one token at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mmspectral
from mmspectral.layers import DarkAttention
from mmspectral.layers.sites import find_sites
from mmspectral.ops.random_features import fold_features, linear_attention

DIM, HEADS, D = 32, 4, 8
DARK = dict(type="dark", num_features=24)
FORMS = dict(
    plain=dict(),
    grouped=dict(num_kv_heads=2),
    context=dict(context_dim=12),
    grouped_context=dict(context_dim=12, num_kv_heads=1),
)
EACH_FORM = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(form="plain", kernel=DARK, **kwargs):
    layer = DarkAttention(DIM, HEADS, qkv_bias=True, kernel=kernel, **FORMS[form], **kwargs)
    for name, parameter in layer.named_parameters():
        if name != "kernel.M":
            nn.init.normal_(parameter, std=0.2)
    return layer


def inputs(form="plain", N=11, L=7):
    """Tokens, and what else forward takes."""
    context = dict(context=torch.randn(2, L, 12)) if "context" in form else {}
    return torch.randn(2, N, DIM), context


def projected(layer, x, context=None):
    """q, k and v with as many heads each, by slices of the weights."""
    if context is None and layer.num_kv_heads == HEADS:
        q, k, v = layer.qkv(x).split(DIM, -1)
    else:
        q, (k, v) = layer.q(x), layer.kv(x if context is None else context).split(layer.num_kv_heads * D, -1)
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
    return q, *(t.repeat_interleave(HEADS // layer.num_kv_heads, 1) for t in (k, v))


@EACH_FORM
@pytest.mark.parametrize("N", [1, 11])
def test_every_form_is_attention_of_its_projections(form, N):
    x, context = inputs(form, N)
    layer, exact = build(form), build(form, kernel=None)
    q, k, v = projected(layer, x, **context)
    features = fold_features(layer.kernel.w, layer.kernel.M.repeat_interleave(HEADS // layer.num_kv_heads, 0), D)
    expected = linear_attention(q, k, v, features).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, **context), layer.proj(expected), rtol=1e-4, atol=1e-5)
    expected = F.scaled_dot_product_attention(*projected(exact, x, **context)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(exact(x, **context), exact.proj(expected), rtol=1e-4, atol=1e-5)
    for module in (layer, exact):
        weights = module.attention_logits(x, **context).softmax(-1)
        expected = (weights @ projected(module, x, **context)[2]).transpose(1, 2).flatten(2)
        torch.testing.assert_close(module(x, **context), module.proj(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["plain", "grouped"])
def test_some_tokens_at_a_time_are_causal_attention(form):
    layer = build(form, kernel=dict(DARK, proposal="sharp", shift="learned")).double()
    nn.init.normal_(layer.kernel.shift)
    layer.kernel.proposal_variance.fill_(1.3)
    x = inputs()[0].double()
    expected = layer(x, is_causal=True)
    state = None
    for piece in (slice(0, 3), slice(3, 4), slice(4, x.shape[1])):
        out, state = layer.step(x[:, piece], state)
        torch.testing.assert_close(out, expected[:, piece], rtol=1e-10, atol=1e-12)
        sizes = [tuple(t.shape) for t in state]
    assert [tuple(t.shape) for t in state] == sizes == [(2, layer.num_kv_heads, 24), (2, layer.num_kv_heads, 24, D)]
    assert not state.mean.requires_grad


@pytest.mark.parametrize("form", ["context", "grouped_context"])
def test_a_context_is_summarised_once_and_may_grow(form):
    layer = build(form).double()
    x, context = inputs(form)
    x, context = x.double(), context["context"].double()
    mask = torch.tensor([[True] * 6 + [False], [True] * 7])
    expected = layer(x, mask, context=context)
    out, state = layer.step(x[:, :5], attn_mask=mask[:, :3], context=context[:, :3])
    torch.testing.assert_close(out, layer(x[:, :5], mask[:, :3], context=context[:, :3]))
    out, state = layer.step(x[:, :5], state, attn_mask=mask[:, 3:], context=context[:, 3:])
    rest, unchanged = layer.step(x[:, 5:], state)
    torch.testing.assert_close(torch.cat([out, rest], 1), expected)
    assert unchanged is state


@pytest.mark.parametrize("kernel", [None, "softmax", "uniform", "constant"])
def test_kernels_without_a_state_say_so(kernel):
    layer = build(kernel=kernel and dict(type=kernel))
    with pytest.raises(TypeError, match=r"a \w+Kernel keeps no state .* is_causal=True"):
        layer.step(inputs()[0])


def test_replaces_timms_attention_in_a_notebook():
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    vit = vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=DIM, depth=2, num_heads=HEADS, num_classes=5
    ).eval()
    weights, x = vit.state_dict(), torch.randn(2, 3, 32, 32)
    outputs = {}
    for name, kernel in (("exact", None), ("coarse", DARK), ("fine", dict(type="dark", num_features=4096))):
        model = copy.deepcopy(vit)
        for i, block in enumerate(model.blocks):
            block.attn = DarkAttention(DIM, num_heads=HEADS, qkv_bias=True, kernel=kernel, layer=i)
        left = model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys and all(".attn.kernel." in key for key in left.missing_keys)
        assert len(left.missing_keys) == (6 if kernel else 0)
        outputs[name] = model.eval()(x)
    torch.testing.assert_close(outputs["exact"], vit(x))
    errors = {name: (out - outputs["exact"]).norm() for name, out in outputs.items()}
    assert errors["exact"] < errors["fine"] < errors["coarse"]
    assert not torch.equal(model.blocks[0].attn.kernel.w, model.blocks[1].attn.kernel.w)


@pytest.mark.parametrize(("form", "heads"), [("plain", [4]), ("grouped", [4, 2]), ("context", [4, 4])])
def test_is_conditioned_and_folded_as_any_attention(form, heads):
    layer, (x, context) = build(form), inputs(form)
    assert [site.num_heads for site in find_sites(layer)] == heads
    before = layer(x, **context)
    mmspectral.condition(layer, dict(type="IdentityCorrection", scale=1.0))
    after = layer(x, **context)
    assert (after - before).norm() > 0.05 * before.norm()
    mmspectral.fold(layer)
    torch.testing.assert_close(layer(x, **context), after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(dim=30), "dim 30 must be a multiple of num_heads 4"),
        (dict(num_kv_heads=3), "that of num_kv_heads 3"),
        (dict(kernel=dict(type="dark", rank=9)), r"rank must be an integer in \[1, 8\]"),
    ],
)
def test_errors_of_settings(kwargs, match):
    with pytest.raises(ValueError, match=match):
        DarkAttention(**(dict(dim=DIM, num_heads=HEADS) | kwargs))


def test_errors_of_calls():
    x, context = inputs("context")
    with pytest.raises(ValueError, match=r"takes a context \[B, L, 12\], as context_dim=12 says"):
        build("context")(x)
    with pytest.raises(ValueError, match="takes a context"):
        build("context").step(x)
    with pytest.raises(ValueError, match="takes no context, as context_dim=None says"):
        build()(x, **context)
    with pytest.raises(ValueError, match=r"mask must be \[B, L\] = \[2, 11\], got \[11, 11\]: attention of"):
        build()(x, torch.ones(11, 11).bool())
    with pytest.raises(TypeError, match="mask must be bool"):
        build()(x, torch.zeros(2, 11))
    with pytest.raises(ValueError, match="as many queries as keys, got 11 and 7"):
        build("context")(x, is_causal=True, **context)

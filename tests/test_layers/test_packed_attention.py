"""Conditioned nn.MultiheadAttention against torch's own with W + C written into its weights."""

import copy
import itertools

import pytest
import torch
from torch import nn

from mmspectral.layers import condition, fold, unfold
from mmspectral.layers.packed_attention import ConditionedMultiheadAttention

SCALE = 3.0
CONDITIONING = dict(type="IdentityCorrection", scale=SCALE)
SEPARATE = dict(kdim=10, vdim=14)


def stock_and_expected(embed_dim=12, num_heads=3, **kwargs):
    """A stock layer, and one whose weights are W + C by hand: ones on the diagonal of each D x E matrix."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(embed_dim, num_heads, **kwargs).double()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected = copy.deepcopy(stock)
    with torch.no_grad():
        if stock.in_proj_weight is not None:
            weights = expected.in_proj_weight.view(3, embed_dim, embed_dim)
        else:
            weights = [expected.q_proj_weight, expected.k_proj_weight, expected.v_proj_weight]
        for weight in weights:
            for i in range(min(weight.shape)):
                weight[i, i] += SCALE
    return stock, expected


def tokens(batch_first, kdim=12, vdim=12):
    q, k, v = torch.randn(2, 5, 12), torch.randn(2, 7, kdim), torch.randn(2, 7, vdim)
    return [t.double() if batch_first else t.double().transpose(0, 1) for t in (q, k, v)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "kwargs", [{}, dict(bias=False, add_zero_attn=True), dict(add_bias_kv=True), SEPARATE], ids=str
)
def test_computes_with_w_plus_c(kwargs, batch_first, training):
    stock, expected = stock_and_expected(batch_first=batch_first, **kwargs)
    model = nn.ModuleDict({"attn": stock}).train(training)
    condition(model, CONDITIONING)
    expected.train(training)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    forbidden = torch.rand(5, 7) < 0.3
    forbidden[:, 0] = False
    per_head = torch.randn(6, 5, 7).double()
    sizes = {name: size for name, size in kwargs.items() if name in SEPARATE}
    for key_padding_mask, attn_mask, need_weights, average in itertools.product(
        (None, padding), (None, forbidden, per_head), (True, False), (True, False)
    ):
        if key_padding_mask is not None and attn_mask is per_head:
            key_padding_mask = torch.zeros(2, 7).double().masked_fill(padding, -torch.inf)
        inputs = [t.requires_grad_() for t in tokens(batch_first, **sizes)]
        options = dict(
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            need_weights=need_weights,
            average_attn_weights=average,
        )
        ours, theirs = model["attn"](*inputs, **options), expected(*inputs, **options)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
        assert (ours[1] is None) == (theirs[1] is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-12)
        grads = [
            torch.autograd.grad(out[0].sin().sum(), [*inputs, *layer.parameters()], allow_unused=True)
            for out, layer in ((ours, model["attn"]), (theirs, expected))
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert list(model["attn"].state_dict()) == list(expected.state_dict())
    assert all(a is b for a, b in zip(model["attn"].parameters(), stock.parameters(), strict=True))


@pytest.mark.parametrize("kwargs", [{}, SEPARATE, dict(bias=False, add_bias_kv=True)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [CONDITIONING, dict(CONDITIONING, scope="head"), dict(type="SVDCorrection"), dict(type="PolarCorrection")],
    ids=str,
)
def test_fold_and_unfold(kwargs, settings):
    """An SVD correction is inverted by its formula, a polar one by the C that fold kept."""
    stock, _ = stock_and_expected(**kwargs)
    before = copy.deepcopy(stock.state_dict())
    model = nn.ModuleDict({"attn": stock}).eval()
    inputs = tokens(False, **{name: size for name, size in kwargs.items() if name in SEPARATE})
    conditioned = condition(model, settings)["attn"](*inputs)[0]
    fold(model)
    assert type(model["attn"]) is nn.MultiheadAttention and not model["attn"].training
    torch.testing.assert_close(model["attn"](*inputs)[0], conditioned, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(next(iter(model.parameters())), next(iter(before.values())))
    assert isinstance(unfold(model)["attn"], ConditionedMultiheadAttention)
    for name, tensor in model["attn"].state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-5)


def test_only_the_targets_are_conditioned():
    stock, expected = stock_and_expected(batch_first=True)
    model = nn.ModuleDict({"attn": copy.deepcopy(stock)})
    condition(model, dict(CONDITIONING, targets=["v"]))
    change = model["attn"].folded().in_proj_weight - stock.in_proj_weight
    torch.testing.assert_close(change[24:], SCALE * torch.eye(12).double())
    assert not change[:24].any()


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_encoder_kernels_do_not_leave_the_correction_out(norm_first):
    """In eval mode nn.TransformerEncoderLayer hands in_proj_weight to a fused kernel of torch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        stock = model(x)
        condition(model, CONDITIONING)
        fold(expected := copy.deepcopy(model))
        conditioned, masked = model(x), model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(conditioned, expected(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            masked[~padding], expected(x, src_key_padding_mask=padding)[~padding], rtol=1e-4, atol=1e-4
        )
        assert (conditioned - stock).norm() > 0.1 * stock.norm()
        torch.testing.assert_close(conditioned, model.train()(x), rtol=1e-4, atol=1e-4)


def test_a_nested_tensor_is_refused():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)}).eval()
    condition(model, CONDITIONING)
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(ValueError, match="no nested tensors.*enable_nested_tensor=False"), torch.no_grad():
        model["attn"](nested, nested, nested)


def test_self_attention_projects_once(monkeypatch):
    """The same tensor as query, key and value stays the same object, which torch's packed projection looks for."""
    stock, _ = stock_and_expected(batch_first=True)
    model = nn.ModuleDict({"attn": stock})
    condition(model, CONDITIONING)
    seen = []
    original = torch.nn.functional.multi_head_attention_forward
    monkeypatch.setattr(
        torch.nn.functional,
        "multi_head_attention_forward",
        lambda q, k, v, *args, **kwargs: seen.append((q is k, k is v)) or original(q, k, v, *args, **kwargs),
    )
    q, k, v = tokens(True)
    model["attn"](q, q, q)
    model["attn"](q, k, k)
    model["attn"](q, k, v)
    assert seen == [(True, True), (False, True), (False, False)]

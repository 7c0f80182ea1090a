import copy
import io

import pytest
import torch
from torch import nn

from mmspectral import ops
from mmspectral.layers import (
    METADATA_KEY,
    ConditionedLinear,
    IdentityCorrection,
    PolarCorrection,
    SVDCorrection,
    condition_linear,
    conditioned_projections,
    fold,
    folded_state_dict,
    refresh_corrections,
    unfold,
)
from mmspectral.ops import ProjectionLayout


class Attention(nn.Module):
    """A fused and a separate projection, as in a user's own model."""

    def __init__(self, correction=None, row_order="[3][heads][d]"):
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.k = nn.Linear(12, 12, bias=False)
        condition_linear(self, "qkv", correction, ("q", "k", "v"), 3, row_order)
        condition_linear(self, "k", correction, ("k",), 3, row_order)

    def forward(self, x):
        return self.qkv(x), self.k(x)


def pair(correction, row_order="[3][heads][d]"):
    torch.manual_seed(0)
    stock = Attention()
    ours = Attention(correction, row_order)
    ours.load_state_dict(stock.state_dict(), strict=True)
    return stock, ours, torch.randn(2, 5, 12)


def test_correction_off_is_stock():
    stock, ours, x = pair(None)
    assert type(ours.qkv) is nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(stock(x), ours(x), strict=True))


@pytest.mark.parametrize("row_order", ops.ROW_ORDERS)
@pytest.mark.parametrize("scope", ops.SCOPES)
def test_correction_is_not_state(scope, row_order):
    stock, ours, _ = pair(IdentityCorrection(scope=scope), row_order)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [p.shape for p in ours.parameters()] == [p.shape for p in stock.parameters()]
    assert not list(ours.buffers())
    stock.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize("row_order", ops.ROW_ORDERS)
@pytest.mark.parametrize("scope", ops.SCOPES)
def test_fold_computes_the_same_and_unfold_is_its_inverse(scope, row_order):
    _, ours, x = pair(IdentityCorrection(7.0, scope), row_order)
    ours = ours.double()
    before, weights = ours(x.double()), copy.deepcopy(ours.state_dict())
    sites = fold(ours)
    assert type(ours.qkv) is nn.Linear and type(ours.k) is nn.Linear
    for a, b in zip(before, ours(x.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    unfold(ours, sites)
    assert isinstance(ours.qkv, ConditionedLinear)
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-14)
    for a, b in zip(before, ours(x.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_fold_of_float32_is_exact_to_1e_6():
    _, ours, x = pair(IdentityCorrection())
    before = ours(x)
    fold(ours)
    for a, b in zip(before, ours(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


def test_fold_warns_about_low_precision():
    _, ours, _ = pair(IdentityCorrection())
    with pytest.warns(UserWarning, match="bfloat16 rounds away"):
        folded_state_dict(ours.bfloat16().state_dict())
    with pytest.warns(UserWarning, match="bfloat16 rounds away"):
        fold(ours)


@pytest.mark.parametrize("row_order", ops.ROW_ORDERS)
@pytest.mark.parametrize("scope", ops.SCOPES)
def test_norm_preserving_form_folds_and_unfolds(scope, row_order):
    _, ours, x = pair(IdentityCorrection(dict(q=7.0, v=2.0), scope, preserve_norm=0.2), row_order)
    ours, x = ours.double(), x.double()
    before, weights = ours(x), copy.deepcopy(ours.state_dict())
    sites = fold(ours)
    torch.testing.assert_close(ours(x), before, rtol=1e-12, atol=1e-12)
    unfold(ours, sites)
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-13)


CONDITIONINGS = [
    IdentityCorrection(7.0, "head"),
    IdentityCorrection(7.0, preserve_norm=0.2),
    SVDCorrection(),
    SVDCorrection(interval=5, targets=("q", "v")),
    PolarCorrection(scope="head"),
]


@pytest.mark.parametrize("conditioning", CONDITIONINGS, ids=repr)
def test_a_saved_state_dict_folds_without_a_model(conditioning):
    stock, ours, x = pair(conditioning)
    expected = ours.eval()(x)
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    folded = folded_state_dict(torch.load(buffer, weights_only=True))
    assert list(folded) == list(stock.state_dict())
    assert not any(METADATA_KEY in entry for entry in folded._metadata.values())
    stock.load_state_dict(folded, strict=True)
    torch.testing.assert_close(stock(x), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(ours(x), expected, strict=True)), "the original is left as it was"


def test_a_saved_state_dict_without_its_correction_is_not_folded():
    _, ours, _ = pair(SVDCorrection(interval=5))
    state = ours.state_dict()
    del state["qkv.correction"]
    with pytest.raises(ValueError, match=r"'qkv.correction' is missing"):
        folded_state_dict(state)


def test_fold_takes_whatever_can_be_folded_and_leaves_the_model_when_one_cannot():
    class Doubled(nn.Linear):
        def folded(self):
            linear = nn.Linear(self.in_features, self.out_features)
            linear.load_state_dict({name: 2 * tensor for name, tensor in self.state_dict().items()})
            return linear

    class Unfoldable(nn.Linear):
        def folded(self):
            raise ValueError("cannot be folded")

    _, ours, x = pair(IdentityCorrection())
    ours.other, ours.last = Doubled(12, 12), Unfoldable(2, 2)
    with pytest.raises(ValueError, match="cannot be folded"):
        fold(ours)
    assert isinstance(ours.qkv, ConditionedLinear) and isinstance(ours.other, Doubled)
    del ours.last
    other = ours.other(x)
    assert list(fold(ours)) == ["qkv", "k"]
    assert type(ours.other) is nn.Linear
    torch.testing.assert_close(ours.other(x), 2 * other)


def test_fold_and_unfold_errors():
    _, ours, _ = pair(IdentityCorrection())
    with pytest.raises(ValueError, match="folded"):
        fold(ours.qkv)
    with pytest.raises(ValueError, match="expected an nn.Linear"):
        unfold(ours, {"qkv": (ours.qkv.conditioning, ours.qkv.layout)})
    with pytest.raises(ValueError, match="'absent'"):
        unfold(ours, {"absent": (ours.qkv.conditioning, ours.qkv.layout)})


def test_parameters_are_shared_and_frozen_state_kept():
    linear = nn.Linear(6, 18).requires_grad_(False).eval()
    ours = ConditionedLinear(linear, IdentityCorrection(), ProjectionLayout(("q", "k", "v"), 2))
    assert ours.weight is linear.weight and ours.bias is linear.bias
    assert not ours.training and not ours.weight.requires_grad
    assert not ours.folded().weight.requires_grad


def test_projection_without_target_is_left_alone():
    _, ours, _ = pair(IdentityCorrection(targets=("q",)))
    assert list(conditioned_projections(ours)) == ["qkv"]


def test_metadata_survives_saving_copying_and_safe_loading():
    _, ours, _ = pair(IdentityCorrection(3.0, "head"))
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(ours).state_dict(), buffer)
    buffer.seek(0)
    entry = torch.load(buffer, weights_only=True)._metadata["qkv"][METADATA_KEY]
    assert entry["scale"] == 3.0 and entry["scope"] == "head"
    assert entry["layout"] == dict(roles=["q", "k", "v"], num_heads=3, row_order="[3][heads][d]")
    fold(ours)
    assert METADATA_KEY not in ours.state_dict()._metadata["qkv"]


def test_wrong_rows_are_refused_when_built():
    with pytest.raises(ValueError, match="not a multiple"):
        ConditionedLinear(8, 20, IdentityCorrection(), ProjectionLayout(("q", "k", "v"), 2))


@pytest.mark.parametrize(
    "conditioning",
    [
        IdentityCorrection(),
        SVDCorrection(interval=5, targets=("q", "v")),
        pytest.param(IdentityCorrection(dict(q=7.0, k=1.0), preserve_norm=0.2), marks=pytest.mark.slow),
        pytest.param(SVDCorrection(), marks=pytest.mark.slow),
        pytest.param(PolarCorrection(scope="head"), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_compiles_without_a_graph_break(conditioning):
    _, ours, x = pair(conditioning)
    refresh_corrections(ours, updates=1)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            x = x.detach().requires_grad_()
            for a, b in zip(compiled(x), ours(x), strict=True):
                torch.testing.assert_close(a, b)
                (grad_a,), (grad_b,) = (torch.autograd.grad(y.float().sum(), x, retain_graph=True) for y in (a, b))
                torch.testing.assert_close(grad_a, grad_b)


def test_conditions_and_folds_a_timm_model():
    """The example of the README, on a model that is not ours."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    stock = model(x)
    for block in model.blocks:
        condition_linear(block.attn, "qkv", IdentityCorrection(1.0), ("q", "k", "v"), 3, "[3][heads][d]")
    conditioned = model(x)
    assert len(conditioned_projections(model)) == 12
    assert not torch.allclose(conditioned, stock)
    fold(model)
    torch.testing.assert_close(model(x), conditioned, rtol=1e-4, atol=1e-4)

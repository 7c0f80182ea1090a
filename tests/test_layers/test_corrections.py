import copy
import pickle

import pytest
import torch
from torch import nn

from mmspectral import ops
from mmspectral.layers import (
    ConditionedLinear,
    Correction,
    IdentityCorrection,
    PolarCorrection,
    SVDCorrection,
    build_conditioning,
    register_conditioning,
)
from mmspectral.layers.projection import _TYPES
from mmspectral.ops import ProjectionLayout


@pytest.mark.parametrize("type_name", ["IdentityCorrection", "mmspectral.IdentityCorrection"])
def test_builds_from_a_dict_under_any_scope(type_name):
    correction = build_conditioning(dict(type=type_name, _scope_="mmdet", scale=3, scope="head", targets=["q"]))
    assert correction == IdentityCorrection(3.0, "head", ("q",))
    assert build_conditioning(correction) is correction
    assert build_conditioning(None) is None


@pytest.mark.parametrize(
    "correction",
    [
        IdentityCorrection(2.5, "head", ("k", "v")),
        IdentityCorrection(dict(q=1, v=10.0), preserve_norm=0.02),
        SVDCorrection(7, "head", ("q",)),
        PolarCorrection(1e4, 3),
    ],
    ids=repr,
)
def test_settings_round_trip(correction):
    again = build_conditioning(correction.settings())
    assert again == correction
    assert copy.deepcopy(correction) == pickle.loads(pickle.dumps(correction)) == correction
    assert hash(again) == hash(correction)


def test_how_weights_are_loaded_is_no_property_of_the_correction():
    correction = IdentityCorrection(2.5, preserve_function=True)
    assert build_conditioning(correction.settings()) == correction
    assert not build_conditioning(correction.settings()).preserve_function


def test_unknown_argument_names_type_arguments_and_remedy():
    """A child config with another type inherits the arguments of its parent's type."""
    with pytest.raises(
        TypeError, match=r"IdentityCorrection has no argument 'interval'.*takes scale, scope.*_delete_=True"
    ):
        build_conditioning(dict(type="IdentityCorrection", scale=1.0, interval=4))


@pytest.mark.parametrize(
    ("cfg", "error", "match"),
    [
        (dict(type="NoSuchCorrection"), KeyError, "known: .*IdentityCorrection"),
        (dict(scale=1.0), TypeError, "string 'type'"),
        ("IdentityCorrection", TypeError, "must be None or a dict"),
        (dict(type="IdentityCorrection", scale="10"), ValueError, "finite number"),
        (dict(type="IdentityCorrection", scale=float("nan")), ValueError, "finite number"),
        (dict(type="IdentityCorrection", scale=dict(q=1.0, v="10")), ValueError, "finite number"),
        (dict(type="IdentityCorrection", scale=dict(o=1.0)), ValueError, "keys out of the targets q, k, v"),
        (dict(type="IdentityCorrection", scale=dict(q=1.0), targets=["v"]), ValueError, "keys out of the targets v"),
        (dict(type="IdentityCorrection", scale=dict()), ValueError, "keys out of the targets"),
        (dict(type="IdentityCorrection", preserve_norm=0.0), ValueError, "preserve_norm"),
        (dict(type="IdentityCorrection", preserve_norm=True), ValueError, "preserve_norm"),
        (dict(type="SVDCorrection", preserve_function=True), ValueError, "SVDCorrection: preserve_function"),
        (dict(type="PolarCorrection", preserve_function=True), ValueError, "PolarCorrection: preserve_function"),
        (dict(type="SVDCorrection", interval=0), ValueError, "positive integer"),
        (dict(type="SVDCorrection", interval=2.0), ValueError, "positive integer"),
        (dict(type="PolarCorrection", kappa=1e7), ValueError, "kappa"),
        (dict(type="PolarCorrection", kappa=1), ValueError, "kappa"),
        (dict(type="SVDCorrection", scale=1.0), TypeError, "no argument 'scale'"),
        (dict(type="IdentityCorrection", scope="rows"), ValueError, "scope"),
        (dict(type="IdentityCorrection", targets=["o"]), ValueError, "targets"),
        (dict(type="IdentityCorrection", targets="qkv"), ValueError, "targets"),
        (dict(type="IdentityCorrection", targets=[]), ValueError, "targets"),
    ],
)
def test_errors(cfg, error, match):
    with pytest.raises(error, match=match):
        build_conditioning(cfg)


def test_users_own_correction():
    class AllOnes(Correction):
        def corrected(self, weight, layout, dtype=None):
            return (weight + 1).to(dtype or weight.dtype)

    with pytest.raises(TypeError, match="must subclass"):
        register_conditioning(nn.Linear)
    try:
        assert register_conditioning(AllOnes) is AllOnes
        correction = build_conditioning(dict(type="AllOnes", targets=["v"]))
        layout = ProjectionLayout(("v",), 1)
        assert torch.equal(correction.matrix(torch.zeros(2, 3), layout), torch.ones(2, 3))
        impostor = type("AllOnes", (AllOnes,), {"__module__": "elsewhere"})
        with pytest.raises(ValueError, match="taken"):
            register_conditioning(impostor)
    finally:
        _TYPES.pop("AllOnes", None)


@pytest.mark.parametrize("targets", [("q",), ("k", "v"), ("q", "k", "v")])
def test_targets_select_projections(targets):
    layout = ProjectionLayout(("q", "k", "v"), 2)
    C = IdentityCorrection(10.0, targets=targets).matrix(torch.zeros(18, 6), layout)
    for role, block in zip("qkv", C.chunk(3), strict=True):
        assert torch.equal(block, 10 * torch.eye(6) if role in targets else torch.zeros(6, 6))


def test_a_scale_for_each_projection():
    layout = ProjectionLayout(("q", "k", "v"), 2)
    C = IdentityCorrection(dict(q=1, v=10.0)).matrix(torch.zeros(18, 6), layout)
    for scale, block in zip((1, 0, 10), C.chunk(3), strict=True):
        assert torch.equal(block, scale * torch.eye(6))


@pytest.mark.parametrize("scope", ops.SCOPES)
@pytest.mark.parametrize("shape", [(192, 192), (128, 256)])
def test_preserve_norm_keeps_the_frobenius_norm_and_the_condition_number(scope, shape):
    """Weights drawn as ViT's, Swin's and XCiT's are: truncated normal of std 0.02."""
    torch.manual_seed(0)
    (D, E), layout = shape, ProjectionLayout(("q", "k", "v"), 4)
    weight = nn.init.trunc_normal_(torch.empty(3 * D, E, dtype=torch.float64), std=0.02)
    scales = dict(q=0.1, k=10.0, v=1.0)
    kept = IdentityCorrection(scales, scope, preserve_norm=0.02).corrected(weight, layout)
    plain = IdentityCorrection(scales, scope).corrected(weight, layout)
    for w, s, p in zip(*(layout.split(t) for t in (weight, kept, plain)), strict=True):
        assert s.norm().item() == pytest.approx(w.norm().item(), rel=0.01)
        assert p.norm() > 1.04 * w.norm()
    kappas = [ops.condition_number(layout.split(t, scope)) for t in (kept, plain)]
    torch.testing.assert_close(*kappas, rtol=1e-9, atol=0)


def test_preserve_norm_scales_the_gradient():
    torch.manual_seed(0)
    layout, x = ProjectionLayout(("v",), 2), torch.randn(5, 8)
    linear = ConditionedLinear(nn.Linear(8, 8), IdentityCorrection(3.0, preserve_norm=0.5), layout)
    linear(x).sum().backward()
    s = ops.norm_factors([3.0], (8, 8), layout, "full", 0.5)[0]
    assert s == pytest.approx((64 * 0.25 / (64 * 0.25 + 8 * 9)) ** 0.5)
    torch.testing.assert_close(linear.weight.grad, s * x.sum(0).expand(8, 8))

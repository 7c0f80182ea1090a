import copy
import pickle

import pytest
import torch
from torch import nn

from mmspectral.layers import Correction, IdentityCorrection, build_conditioning, register_conditioning
from mmspectral.layers.base import _TYPES
from mmspectral.ops import ProjectionLayout


@pytest.mark.parametrize("type_name", ["IdentityCorrection", "mmspectral.IdentityCorrection"])
def test_builds_from_a_dict_under_any_scope(type_name):
    correction = build_conditioning(dict(type=type_name, _scope_="mmdet", scale=3, scope="head", targets=["q"]))
    assert correction == IdentityCorrection(3.0, "head", ("q",))
    assert build_conditioning(correction) is correction
    assert build_conditioning(None) is None


def test_settings_round_trip():
    correction = IdentityCorrection(2.5, "head", ("k", "v"), preserve_function=True)
    again = build_conditioning(correction.settings())
    assert again == correction
    assert not again.preserve_function, "how weights are loaded is no property of C"
    assert copy.deepcopy(correction) == pickle.loads(pickle.dumps(correction)) == correction
    assert hash(again) == hash(correction)


def test_unknown_argument_names_type_arguments_and_remedy():
    """A child config with another type inherits the arguments of its parent's type."""
    with pytest.raises(
        TypeError, match=r"IdentityCorrection has no argument 'interval'.*takes scale, scope.*_delete_=True"
    ):
        build_conditioning(dict(type="IdentityCorrection", scale=1.0, interval=4))


@pytest.mark.parametrize(
    ("cfg", "error", "match"),
    [
        (dict(type="SpectralNorm"), KeyError, "known: .*IdentityCorrection"),
        (dict(scale=1.0), TypeError, "string 'type'"),
        ("IdentityCorrection", TypeError, "must be None or a dict"),
        (dict(type="IdentityCorrection", scale="10"), ValueError, "finite number"),
        (dict(type="IdentityCorrection", scale=float("nan")), ValueError, "finite number"),
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
        def linear(self, x, weight, bias, layout):
            return nn.functional.linear(x, self.corrected(weight, layout), bias)

        def corrected(self, weight, layout):
            return weight + 1

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

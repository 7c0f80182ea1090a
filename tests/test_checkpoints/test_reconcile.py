"""Weights of one correction become those of another, for projections and nn.MultiheadAttention alike."""

import copy
import io

import pytest
import torch
from torch import nn

import mmspectral
from mmspectral.checkpoints import folded_state_dict
from mmspectral.checkpoints.files import Weights
from mmspectral.checkpoints.reconcile import fold_weights, model_sites, reconcile, unfold_weights
from mmspectral.layers import METADATA_KEY, build_conditioning
from tests.test_layers.test_surgery import CONDITIONINGS


class Layer(nn.Module):
    """Attention over a fused projection and, where that is possible, torch's own in both forms."""

    def __init__(self, packed=True):
        super().__init__()
        self.num_heads = 3
        self.qkv = nn.Linear(12, 36)
        self.packed = nn.MultiheadAttention(12, 3, batch_first=True) if packed else None
        self.separate = nn.MultiheadAttention(12, 3, kdim=6, batch_first=True) if packed else None

    def forward(self, x):
        y = self.qkv(x)
        if self.packed is not None:
            y = y + self.packed(x, x, x)[0].repeat(1, 1, 3) + self.separate(x, x[..., :6], x)[0].repeat(1, 1, 3)
        return y


def make(settings):
    torch.manual_seed(0)
    stock = Layer(packed="interval" not in settings).double().eval()
    rows = {"qkv": dict(row_order="[3][heads][d]", num_heads=3)}  # it is no attention that could show them
    return stock, mmspectral.condition(copy.deepcopy(stock), settings, layout=rows), torch.randn(2, 5, 12).double()


def weights_of(model):
    state = model.state_dict()
    return Weights(dict(state), {name: dict(entry) for name, entry in state._metadata.items()})


def load(model, weights):
    model.load_state_dict(weights.state_dict(), strict=True)
    return model


@pytest.mark.parametrize("settings", CONDITIONINGS, ids=repr)
def test_a_saved_state_dict_folds_and_unfolds_without_a_model(settings):
    stock, model, x = make(settings)
    expected, buffer = model(x), io.BytesIO()
    torch.save(copy.deepcopy(model).state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    for name in ("qkv", *(["packed"] if model.packed is not None else [])):
        note = dict(state._metadata[name][METADATA_KEY])
        assert note.pop("layout") == dict(roles=["q", "k", "v"], num_heads=3, row_order="[3][heads][d]")
        assert build_conditioning(note) == build_conditioning(settings)
    folded = folded_state_dict(state)
    assert list(folded) == list(stock.state_dict())
    assert not any(METADATA_KEY in entry for entry in folded._metadata.values())
    stock.load_state_dict(folded, strict=True)
    torch.testing.assert_close(stock(x), expected, rtol=1e-11, atol=1e-11)
    assert torch.equal(model(x), expected), "the original is left as it was"
    if "interval" in settings:
        del state["qkv.correction"]
        with pytest.raises(ValueError, match="'qkv.correction' is missing"):
            folded_state_dict(state)
    elif settings["type"] != "PolarCorrection":
        again = weights_of(stock)
        unfold_weights(again, model_sites(model), "file")
        torch.testing.assert_close(load(model, again)(x), expected, rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="has a correction already"):
            unfold_weights(again, model_sites(model), "file")


@pytest.mark.parametrize("settings", CONDITIONINGS[:3], ids=repr)
@pytest.mark.parametrize("source", [None, *CONDITIONINGS[:2]], ids=repr)
def test_preserve_function_shifts_from_any_correction_to_an_identity(source, settings):
    _, theirs, x = make(source or settings)
    if source is None:
        theirs = make(settings)[0]
    expected = theirs(x)
    _, ours, _ = make(dict(settings, preserve_function=True))
    weights = weights_of(theirs)
    dtypes = {name: tensor.dtype for name, tensor in ours.state_dict().items()}
    assert reconcile(weights, model_sites(ours), dtypes, "file") == []
    torch.testing.assert_close(load(ours, weights)(x), expected, rtol=1e-9, atol=1e-9)


def test_what_would_change_the_function_is_refused_by_name():
    stock, model, _ = make(CONDITIONINGS[0])
    dtypes = {name: tensor.dtype for name, tensor in stock.state_dict().items()}
    with pytest.raises(ValueError, match="file: packed was trained with IdentityCorrection.*built without one.*fold"):
        reconcile(weights_of(model), {}, dtypes, "file")
    with pytest.raises(ValueError, match="trained without a correction.*preserve_function"):
        reconcile(weights_of(stock), model_sites(model), dtypes, "file")
    unknown = reconcile(weights_of(stock), model_sites(model), dtypes, "file", accept_unknown=True)
    assert unknown == ["packed", "qkv", "separate"]
    assert reconcile(weights_of(stock), model_sites(model), dtypes, "file", trained_with_conditioning=True) == []
    broken = weights_of(model)
    broken.metadata["qkv"][METADATA_KEY] = dict(type="Unheard", layout=dict(roles=["q"], num_heads=1))
    with pytest.raises(ValueError, match="cannot be built here"):
        fold_weights(broken, "file")
    with pytest.warns(UserWarning, match="bfloat16"):
        folded_state_dict(make(CONDITIONINGS[0])[1].bfloat16().state_dict())

"""Random settings and checkpoint files: a working model, or an error of ours that says what is wrong."""

import inspect
import io
import operator
import os
import pickle
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mmspectral
from mmspectral import layers
from mmspectral.checkpoints import LoadReport, load_backbone
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError
from mmspectral.layers import condition_linear
from tests.helpers import Call

PACKAGE = Path(mmspectral.__file__).parent
OURS = (ValueError, TypeError, KeyError, FileNotFoundError, DamagedCheckpointError, UnsafeCheckpointError)
TYPES = {
    name: list(inspect.signature(getattr(layers, name)).parameters)
    for name in (
        *("IdentityCorrection", "SVDCorrection", "PolarCorrection", "SpectralNorm"),
        *("SigmaReparam", "QKNorm", "OrthogonalInit"),
    )
}
NUMBERS = st.sampled_from([0, 1, 2, -1, 0.02, 10.0, 1e-30, 1e6, 1e39, float("nan"), float("inf"), 10**400, True])
WORDS = st.sampled_from(["q", "k", "v", "qkv", "full", "head", "layer", "rms", ""])
TARGETS = st.lists(st.sampled_from(["q", "k", "v"]), min_size=1, unique=True)
VALUES = NUMBERS | WORDS | TARGETS | st.none() | st.lists(NUMBERS | st.lists(WORDS, max_size=1), max_size=3)
VALUES |= st.dictionaries(WORDS | st.just(3), NUMBERS, max_size=3)


def budget(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def few_or(many, few):
    """Few examples, and in the slow tests many."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


def error_of_ours(error, *names):
    """Assert that an exception was raised by a statement of this package with a message that names its subject."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    assert isinstance(error, OURS), repr(error)
    assert Path(frame.filename).is_relative_to(PACKAGE), f"{error!r} from {frame}"
    assert any(name in str(error) for name in names), repr(error)


@st.composite
def conditioning_settings(draw):
    name = draw(st.sampled_from(list(TYPES)))
    arguments = draw(st.dictionaries(st.sampled_from([*TYPES[name], "nonsense"]), VALUES, max_size=3))
    return dict(type=name, **arguments)


def a_working_projection_or_an_error_of_ours(config):
    try:
        conditioning = layers.build_conditioning(config)
    except Exception as error:
        error_of_ours(error, config["type"])
        return
    assert layers.build_conditioning(conditioning.settings()) == conditioning
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        condition_linear(model, "0", conditioning, ("q", "k", "v"), 2, "[3][heads][d]")
        y = model(torch.randn(2, 5, 8))
        y.sum().backward()
    assert y.shape == (2, 5, 24)
    assert model[0].weight.grad is not None
    assert y.isfinite().all()


@few_or(2000, few=150)
def test_conditioning_settings(examples):
    budget(examples)(given(conditioning_settings())(a_working_projection_or_an_error_of_ours))()


@budget(60)
@given(config=VALUES | st.fixed_dictionaries(dict(type=VALUES)))
def test_what_is_no_conditioning(config):
    if config is None:
        assert layers.build_conditioning(config) is None
        return
    with pytest.raises((TypeError, KeyError)) as caught:
        layers.build_conditioning(config)
    error_of_ours(caught.value, "conditioning")


@st.composite
def kernel_settings(draw):
    names = ["num_features", "sharing", "rank", "proposal", "shift", "orthogonal", "seed", "nonsense"]
    words = st.sampled_from(["head", "layer", "model", "sharp", "theorem_3_2", "fixed", "learned"])
    return dict(
        type=draw(st.sampled_from(["dark", "learned", "temperature", "performer", "constant", "uniform", "softmax"])),
        # Mostly one: an error of another would hide what its value does.
        **draw(st.dictionaries(st.sampled_from(names), words | VALUES, max_size=draw(st.sampled_from([1, 1, 2])))),
    )


@budget(150)
@given(config=kernel_settings())
def test_kernel_settings(config):
    """Attention whose weights sum to one and whose parameters get gradients, or an error of ours."""
    try:
        kernel = layers.build_kernel(config, num_heads=2, head_dim=8)
    except Exception as error:
        error_of_ours(error, *sorted(set(config) - {"type"}))
        return
    q, k = torch.randn(2, 1, 2, 5, 8)
    out = kernel(q, k, torch.ones(1, 2, 5, 3))
    torch.testing.assert_close(out, torch.ones(1, 2, 5, 3))
    if list(kernel.parameters()):
        kernel(q, k, torch.randn(1, 2, 5, 3)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in kernel.parameters())


def tiny_model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def written(form):
    """Bytes of a valid checkpoint."""
    if form == "safetensors":
        save = pytest.importorskip("safetensors.torch").save
        return save(tiny_model().state_dict(), {"format": "pt", "mmspectral": "{}"})
    file = io.BytesIO()
    content = dict(state_dict=tiny_model().state_dict(), meta=dict(epoch=1, classes=("a", "b")))
    torch.save(content, file, _use_new_zipfile_serialization=form == "zip")
    return file.getvalue()


def a_loaded_model_or_an_error_of_ours(content, path):
    path.write_bytes(content)
    warnings.simplefilter("ignore")  # torch warns of odd protocols in the pickle; pytest undoes this
    try:
        report = load_backbone(tiny_model(), str(path))
    except Exception as error:
        error_of_ours(error, path.name)
        return
    assert isinstance(report, LoadReport) and report.share >= 0.9


def damaged(data, form):
    content = bytearray(written(form))
    if data.draw(st.booleans(), label="cut"):
        return bytes(content[: data.draw(st.integers(0, len(content) - 1), label="length")])
    # The first bytes hold the header or the pickle, where a flip does most.
    end = data.draw(st.sampled_from([100, 1500, len(content)]), label="within")
    for position in data.draw(st.lists(st.integers(0, min(end, len(content)) - 1), min_size=1, max_size=3)):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(content)


@few_or(1000, few=60)
@pytest.mark.parametrize(("form", "suffix"), [("zip", "pth"), ("old", "pth"), ("safetensors", "safetensors")])
def test_damaged_checkpoints(form, suffix, tmp_path, examples):
    def check(data):
        a_loaded_model_or_an_error_of_ours(damaged(data, form), tmp_path / f"weights.{suffix}")

    budget(examples)(given(st.data())(check))()


HOSTILE = {
    "system": lambda marker: Call(os.system, f"touch {marker}"),
    "eval": lambda marker: Call(eval, f"open({str(marker)!r}, 'w')"),
    "open": lambda marker: Call(open, str(marker), "w"),
    "methodcaller": lambda marker: Call(operator.methodcaller("system", f"touch {marker}"), Call(__import__, "os")),
    "nested": lambda marker: Call(pickle.loads, pickle.dumps(Call(os.system, f"touch {marker}"))),
}


@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_pickles_run_nothing(attack, form, tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "weights.pth"
    content = dict(state_dict=tiny_model().state_dict(), meta=HOSTILE[attack](marker))
    if form == "pickle":
        path.write_bytes(pickle.dumps(content["meta"]))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(UnsafeCheckpointError, match="weights.pth is not read"):
        load_backbone(tiny_model(), str(path))
    assert not marker.exists()
    if form == "pickle":
        pickle.loads(path.read_bytes())
        assert marker.exists(), "the attack would not have worked anyway"

"""Altered state dicts: a model with finite outputs and every name accounted for, or one line; and so the converters."""

import contextlib
import copy
import random
import traceback
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch

import mmspectral
from mmspectral import models
from mmspectral.checkpoints import TARGETS, convert, fold_file, load_backbone, publish
from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain
from mmspectral.errors import UsageError
from mmspectral.layers import METADATA_KEY

CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
STAGES = dict(embed_dims=8, depths=[1, 2], num_heads=[1, 2])
SETTINGS = {
    "xcit": ("SpectralXCiT", dict(arch=dict(embed_dims=16, depth=2, num_heads=2), patch_size=8)),
    "swin": ("SpectralSwin", dict(arch=STAGES, window_size=4)),
    "vit": (
        "SpectralViT",
        dict(arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32), img_size=32),
    ),
    "davit": ("SpectralDaViT", dict(arch=STAGES, window_size=4)),
}
PACKAGE = Path(mmspectral.__file__).parent
SCALARS = (None, True, 0, -1, 10**30, 0.5, float("nan"), "", "q", [], [1], {}, (2, 2))


def built(family, **kwargs):
    name, settings = SETTINGS[family]
    torch.manual_seed(0)
    return getattr(models, name)(**copy.deepcopy(settings), **kwargs).eval()


def other_tensor(rng, tensor):
    floating = tensor.float()
    return rng.choice(
        [
            lambda: torch.tensor(1.0),
            lambda: floating.flatten(),
            lambda: floating[None],
            lambda: floating[..., :-1] if tensor.ndim else floating,
            lambda: floating[:1].repeat(3, *[1] * (tensor.ndim - 1)) if tensor.ndim else floating,
            lambda: torch.full_like(floating, float("nan")),
            lambda: torch.full_like(floating, float("inf")),
            lambda: floating.long(),
            lambda: floating > 0,
            lambda: floating.half(),
            lambda: floating.double(),
            lambda: floating.to(torch.complex64),
            lambda: floating.to_sparse() if tensor.ndim else floating,
            lambda: floating.new_zeros((0, *tensor.shape[1:])),
            lambda: floating.tolist(),
            lambda: None,
        ]
    )()


def mutate(rng, state, metadata):
    """Change one entry of a state dict or of what is noted beside it; return whether the function may be another."""
    name = rng.choice(list(state))
    kinds = ["value"] * 6 + ["harmless"] * 6 + ["drop", "rename", "key", "add", "deeper", "note", "note", "metadata"]
    kind = rng.choice(kinds)
    if kind == "value":
        wanted = rng.choice(["", "pos_embed", "bias_table", "downsample", "cls_token", "qkv"])
        name = rng.choice([n for n in state if wanted in str(n)] or [name])
        if isinstance(state[name], torch.Tensor):
            state[name] = other_tensor(rng, state[name])
    elif kind == "harmless":
        state[rng.choice(["head.weight", "head.fc.bias", "head_dist.weight"])] = torch.zeros(3)
        state |= {n: t.half() for n, t in state.items() if isinstance(t, torch.Tensor) and t.dtype == torch.float32}
    elif kind == "drop":
        del state[name]
    elif kind == "rename":
        state[f"{name}_"] = state.pop(name)
    elif kind == "key":
        state[rng.choice([3, None, 0.5, ("a", "b"), b"bytes", ""])] = state.pop(name)
    elif kind == "add":
        prefix = rng.choice(["", "layers.x.", "stages.1.blocks.", "stages.-1.", "xca_layers.99999999999999999999."])
        state[f"{prefix}{rng.choice(['gamma', 'norm.weight', 'ln1', '.', 'a..b'])}"] = torch.zeros(3)
    elif kind == "deeper":
        state |= {str(n).replace(".1.", ".7."): t for n, t in state.items() if ".1." in str(n)}
    elif kind == "note":
        noted = [n for n, entry in metadata.items() if isinstance(entry, dict) and METADATA_KEY in entry]
        site = rng.choice(noted or [""])
        entry = metadata.setdefault(site, {})
        if isinstance(entry, dict):
            note = entry.setdefault(METADATA_KEY, dict(CONDITIONING))
            if isinstance(note, dict):
                note[rng.choice([*note, "layout", "nonsense"])] = rng.choice(SCALARS)
            if rng.random() < 0.3:
                entry[rng.choice([METADATA_KEY, "pos_embed_grid", "version"])] = rng.choice(SCALARS)
    else:
        metadata[rng.choice([*metadata, 3, "absent"])] = rng.choice(SCALARS)
    return kind != "harmless"


def convert_or_refuse(rng, path):
    """Every converter gives a file, or a line for the user."""
    target = path.with_name("converted.pth")
    for function in (partial(convert, to=rng.choice(TARGETS)), fold_file):
        with contextlib.suppress(UsageError):
            function(str(path), target, force=True)
    with contextlib.suppress(UsageError):
        publish(str(path), target, fold=rng.random() < 0.5, force=True).unlink()


def check(number, path):
    """Write and load the altered file of this number; return whether it was accepted."""
    rng = random.Random(number)
    family = rng.choice(list(SETTINGS))
    trained = rng.choice([None, CONDITIONING])
    source = built(family, conditioning=trained)
    state, metadata = dict(source.state_dict()), copy.deepcopy(dict(source.state_dict()._metadata))
    if rng.random() < 0.4:
        state, metadata = from_mmpretrain(state, rng.choice(FAMILIES[family].namings)), {}
    changed = [mutate(rng, state, metadata) for _ in range(rng.choice([1, 1, 2, 3]))]
    content = OrderedDict(state)
    content._metadata = rng.choice(SCALARS) if rng.random() < 0.05 else metadata
    faithful = not any(changed) and (trained is None or content._metadata == metadata != {})  # else C is not known
    torch.save({rng.choice(["state_dict", "model"]): content}, path)
    convert_or_refuse(rng, path)
    own = rng.choice([trained, trained, None, CONDITIONING, CONDITIONING | dict(preserve_function=True)])
    model = built(family, conditioning=own)
    try:
        report = load_backbone(model, str(path))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        assert isinstance(error, ValueError) and Path(frame.filename).is_relative_to(PACKAGE), f"{number}: {error!r}"
        assert path.name in str(error), f"{number}: {error!r}"
        return False
    assert report.share >= 0.9
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        outputs, expected = model(x), source(x)
    assert all(out.isfinite().all() for out in outputs), number
    if faithful:
        for a, b in zip(outputs, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02, msg=str(number))  # weights in half precision
    return True


@pytest.mark.parametrize("numbers", [range(60), pytest.param(range(2000), marks=pytest.mark.slow)], ids=len)
def test_an_altered_state_dict_is_a_working_model_or_one_line(numbers, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accepted = [check(number, tmp_path / "altered.pth") for number in numbers]
    assert 0.05 < sum(accepted) / len(accepted) < 0.9

"""Decide what weights become that were trained under another correction than that of the model that loads them.

A *site* is a projection or an ``nn.MultiheadAttention`` by its name, with its
conditioning and row layout. Those of a file are in the metadata of its state
dict, those of a model in its modules. Every change of a weight from one to the
other is made here: loading, folding, unfolding, publishing. So is the fit of a
position embedding to another grid of patches and other extra tokens.
"""

import math
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from mmengine.logging import print_log
from mmpretrain.models.utils import resize_pos_embed
from torch import Tensor, nn

from mmspectral.checkpoints.files import Weights
from mmspectral.layers import (
    METADATA_KEY,
    Conditioning,
    Correction,
    build_conditioning,
    unfolded_weight,
    warn_of_low_precision,
)
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.precision import at_least_float32

GRID_KEY = "pos_embed_grid"
MOST_EXTRA_TOKENS = 2  # class token, distillation token

Site = tuple[Conditioning, ProjectionLayout]
Grid = tuple[int, int]


def model_sites(model: nn.Module) -> dict[str, Site]:
    """Return the conditioned sites of a model."""
    return {
        name: (module.conditioning, module.layout)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "conditioning", None), Conditioning)
    }


def noted_sites(weights: Weights, source: str) -> dict[str, Site]:
    """Return the sites that the metadata of a file tells of.

    Raises:
        ValueError: Of a conditioning that cannot be built here.
    """
    sites = {}
    for name, entry in weights.metadata.items():
        if METADATA_KEY not in entry:
            continue
        try:
            settings = dict(entry[METADATA_KEY])
            layout = ProjectionLayout(**settings.pop("layout"))
            sites[name] = build_conditioning(settings), layout
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} was trained with a correction that cannot be built here: {error}") from error
    return sites


def compare_depths(backbone: nn.Module, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the lists of blocks in which a file and a backbone differ in number: those of the file, and its own.

    Blocks that the backbone knows of and does not build, see ``whole_depths`` of ours, count as its own.
    """
    own = _depths(backbone.state_dict()) | getattr(backbone, "whole_depths", {})
    return {name: (count, own[name]) for name, count in _depths(names).items() if own.get(name, count) != count}


def unaccounted(
    backbone: nn.Module, weights: Weights, missing: Collection[str], unused: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return which of the names without a counterpart change what the weights were trained for.

    Not those that a backbone of ours knows to be new or cut, and not what belongs
    to a correction, which :func:`reconcile` compares; of other models, none.

    Args:
        backbone: The model.
        weights: Of the file, under its names.
        missing: Names of the model alone.
        unused: Names of the file alone.
    """
    if not hasattr(backbone, "whole_depths"):
        return [], []
    ours = tuple(f"{name}." for name in model_sites(backbone))
    theirs = tuple(f"{name}." for name, entry in weights.metadata.items() if METADATA_KEY in entry)
    extra = [name for name in missing if not name.startswith(ours) or name.endswith((".weight", ".bias"))]
    return (
        [name for name in extra if not backbone.may_lack(name)],
        [name for name in unused if not backbone.is_cut(name) and not name.startswith(theirs)],
    )


def check_numbers(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise a ValueError if a parameter's values are not all finite, or one of a buffer is NaN."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            broken = tensor.isnan() if name not in parameters else ~tensor.isfinite()
            if broken.any():
                raise ValueError(
                    f"{source}: {int(broken.sum())} of the {tensor.numel()} values of {name} are NaN or infinite, as "
                    "after a training that diverged. Take an earlier checkpoint."
                )


def _depths(names: Collection[str]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                container = ".".join(parts[:i])
                depths[container] = max(depths.get(container, 0), int(part) + 1)
    return depths


def reconcile(
    weights: Weights,
    own: Mapping[str, Site],
    dtypes: Mapping[str, torch.dtype],
    source: str,
    trained_with_conditioning: bool | None = None,
    accept_unknown: bool = False,
) -> list[str]:
    """Replace W by W + C_file - C_model where the two differ and the model's settings allow it (``preserve_function``).

    Changes the tensors in ``weights`` and brings its metadata in line.

    Args:
        weights: From :func:`mmspectral.checkpoints.find_weights`, under the names of the model.
        own: Sites of the model.
        dtypes: Of the model's tensors, by name; others are left alone.
        source: Name of the file, for messages.
        trained_with_conditioning: Overrides the metadata: True means "under the
            model's own", False "under none".
        accept_unknown: Whether weights without a note of a correction are taken
            as they are: they may be stock weights or may have lost the note.

    Returns:
        Sites whose weights were accepted so; :func:`unknown_message` says what that means.

    Raises:
        ValueError: The model would compute something else than it was trained for.
    """
    if trained_with_conditioning is None:
        trained = noted_sites(weights, source)
    else:
        trained = own if trained_with_conditioning else {}
    changed, unknown = 0, []
    for name in sorted({*own, *trained}):
        ours, theirs = own.get(name), trained.get(name)
        parameters = [key for key in _parameters(name, (ours or theirs)[1], weights) if key in dtypes]
        if not parameters:
            continue
        if ours != theirs:
            if _may_convert(theirs, ours):
                _shift(name, weights, theirs, ours, source)
                weights.tensors |= {key: weights.tensors[key].to(dtypes[key]) for key in parameters}
                changed += 1
            elif theirs is None and not isinstance(ours[0], Correction):
                continue  # no C to subtract: these alternatives start from stock weights as they are
            elif theirs is None and accept_unknown:
                unknown.append(name)
                continue
            else:
                raise ValueError(_mismatch_message(source, name, theirs, ours))
        weights.metadata[name] = {**weights.metadata.get(name, {}), **_note(ours)}
    if changed:
        print_log(f"{source}: {changed} weights shifted by their correction to keep the function.", "current")
    return unknown


def unknown_message(source: str, conditioning: Conditioning, example: str, others: int | str) -> str:
    """Say that weights without a note were taken as they are."""
    return (
        f"{source} does not say under which correction {example} and {others} more weights were trained. They are "
        f"taken to be W of W + C with {conditioning}. If they are stock weights the model now computes something "
        "else: load them through init_cfg, or set preserve_function=True."
    )


def reconcile_while_loading(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, *_: Any) -> None:
    """Reconcile one site in the middle of ``load_state_dict``, whoever calls it; a pre-hook with the module."""
    name, dtypes = prefix.removesuffix("."), {key: t.dtype for key, t in module.state_dict(prefix=prefix).items()}
    weights = Weights({key: state_dict[key] for key in dtypes if key in state_dict}, {name: dict(local_metadata)})
    site = (module.conditioning, module.layout)
    if reconcile(weights, {name: site}, dtypes, "the state dict", accept_unknown=True):
        # The same words for every site, so that Python says them once.
        warnings.warn(unknown_message("a state dict", site[0], "a projection", "possibly"), stacklevel=2)
    state_dict.update(weights.tensors)
    local_metadata.update(weights.metadata[name])


def fold_weights(weights: Weights, source: str) -> int:
    """Write W + C under the names of W, in place, with no stored ``correction`` and no note left.

    Returns:
        Number of sites folded.

    Raises:
        ValueError: A weight was trained with something that is no correction,
            or its stored C is missing.
    """
    sites = noted_sites(weights, source)
    for name, site in sites.items():
        conditioning = site[0]
        if not isinstance(conditioning, Correction) or (
            conditioning.stored and f"{name}.correction".removeprefix(".") not in weights.tensors
        ):
            raise ValueError(
                f"{source}: cannot fold {name!r}, trained with {conditioning}: it is no correction, or its tensor "
                f"'{name}.correction' is missing. Load it into the model and use mmspectral.fold(model)."
            )
        warn_of_low_precision(weights.tensors[key] for key in _parameters(name, site[1], weights))
        _shift(name, weights, site, None, source)
        weights.metadata[name] = {k: v for k, v in weights.metadata[name].items() if k != METADATA_KEY}
    return len(sites)


def unfold_weights(weights: Weights, sites: Mapping[str, Site], source: str) -> None:
    """Write W = W' - C in the place of W', in place, and note the correction.

    Raises:
        ValueError: A weight is missing, has a correction already, or is the W + C of no W.
    """
    for name, site in sites.items():
        parameters = _parameters(name, site[1], weights)
        if not parameters or METADATA_KEY in weights.metadata.get(name, {}):
            there = "has a correction already" if parameters else "is not in the file"
            raise ValueError(
                f"{source}: {name} {there}; its names begin like {', '.join(list(weights.tensors)[:3])}. "
                "Names of another code base: tools/model_converters/convert.py."
            )
        for key, layout in parameters.items():
            weights.tensors[key] = unfolded_weight(key, weights.tensors[key], site[0], layout)
        weights.metadata[name] = {**weights.metadata.get(name, {}), **_note(site)}


def folded_state_dict(state_dict: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
    """Return a copy of a saved state dict, with its metadata, as :func:`fold_weights` leaves it; tensors are shared."""
    metadata = {name: dict(entry) for name, entry in getattr(state_dict, "_metadata", {}).items()}
    weights = Weights(dict(state_dict), metadata)
    fold_weights(weights, "the state dict")
    return weights.state_dict()


def find_grid(length: int, stated: Grid | None, own: Grid, extra_tokens: int) -> Grid:
    """Return the grid (h, w) of a position embedding of ``length`` = T + h * w rows, T of them for extra tokens.

    A tensor does not say h and w: our files keep them in the metadata of the
    state dict. Without a stated grid it is square or that of the model, ``own``,
    and the number of extra tokens in the file decides between several that fit.

    Raises:
        ValueError: The stated grid does not fit, none fits, or two do.
    """
    if stated is not None:
        if not isinstance(stated, (tuple, list)) or [type(side) for side in stated] != [int, int] or min(stated) < 1:
            raise ValueError(f"the grid of patches must be two whole numbers, rows and columns, got {stated!r}.")
        if not 0 <= length - math.prod(stated) <= MOST_EXTRA_TOKENS:
            raise ValueError(
                f"pos_embed in the checkpoint has {length} rows, but a grid of {stated[0]} x {stated[1]} patches has "
                f"{math.prod(stated)}, and at most {MOST_EXTRA_TOKENS} more for class and distillation token. "
                "Correct `pretrained_grid` (rows and columns of patches that the checkpoint was trained with)."
            )
        return tuple(stated)
    found: dict[Grid, int] = {}
    for extra in range(MOST_EXTRA_TOKENS + 1):
        side = math.isqrt(max(length - extra, 0))
        if side and side * side == length - extra:
            found[side, side] = extra
    if 0 <= length - math.prod(own) <= MOST_EXTRA_TOKENS:
        found[own] = length - math.prod(own)
    if len(found) > 1:
        found = {grid: extra for grid, extra in found.items() if extra == extra_tokens} or found
    if len(found) == 1:
        return next(iter(found))
    candidates = " and ".join(f"{h} x {w}" for h, w in found) or "neither a square grid nor this model's"
    raise ValueError(
        f"pos_embed in the checkpoint has {length} rows, {extra_tokens} of them for class and distillation token, and "
        f"the file does not say its grid of patches: {candidates} would fit. State it to the backbone as "
        "`pretrained_grid=(rows, columns)`, the image size of the checkpoint's training over the patch size."
    )


def fit_pos_embed(pos_embed: Tensor, grid: Grid, own: Tensor, own_grid: Grid, mode: str, tokens: int = 0) -> Tensor:
    """Return ``pos_embed`` [1, T + h * w, D] resampled to the grid of ``own`` [1, T' + h' * w', D].

    Of the file's extra tokens, ``tokens`` in number, those without a row get zero
    (timm's ``no_embed_class``). Rows for tokens that the file lacks keep the
    values they have in ``own``; an embedding that fits is returned as it is.
    """
    extra = pos_embed.shape[1] - math.prod(grid)
    wanted = own.shape[1] - math.prod(own_grid)
    resized = resize_pos_embed(pos_embed, grid, own_grid, mode, extra)
    if extra == wanted:
        return resized
    kept = min(extra, wanted)
    fresh = own.detach()[:, kept:wanted].to(resized, copy=True)
    fresh[:, : max(tokens - kept, 0)] = 0
    return torch.cat((resized[:, :kept], fresh, resized[:, extra:]), dim=1)


def _parameters(name: str, layout: ProjectionLayout, weights: Weights) -> dict[str, ProjectionLayout]:
    """Return the weights of a site that a file has, by full name, with their rows."""
    prefix = f"{name}." if name else ""
    rows = {
        f"{prefix}weight": layout,
        f"{prefix}in_proj_weight": layout,  # of an nn.MultiheadAttention
        **{f"{prefix}{role}_proj_weight": ProjectionLayout((role,), layout.num_heads) for role in layout.roles},
    }
    return {key: layout for key, layout in rows.items() if key in weights.tensors}


def _may_convert(theirs: Site | None, ours: Site | None) -> bool:
    preserves = ours is not None and getattr(ours[0], "preserve_function", False)
    return preserves and (theirs is None or isinstance(theirs[0], Correction))


def _shift(name: str, weights: Weights, theirs: Site | None, ours: Site | None, source: str) -> None:
    """Bring the weights of a site from W of one correction to W of another; None is none."""
    C = weights.tensors.pop(f"{name}.correction".removeprefix("."), None)  # where it is stored, in the file
    for key, layout in _parameters(name, (theirs or ours)[1], weights).items():
        weight = weights.tensors[key]
        exact = weight.double() if ours and weight.dtype.itemsize >= 4 else at_least_float32(weight)
        try:
            if C is not None:
                exact = exact + C
            elif theirs is not None:
                exact = theirs[0].corrected(exact, layout)
            weights.tensors[key] = exact.to(weight.dtype) if ours is None else ours[0].uncorrected(exact, layout)
        except (RuntimeError, ValueError) as error:  # of a shape that is not that of the noted rows
            raise ValueError(f"{source}: the function of {key} cannot be kept: {error}") from error


def _note(site: Site) -> dict:
    conditioning, layout = site
    return {METADATA_KEY: dict(conditioning.settings(), layout=layout.as_dict())}


def _mismatch_message(source: str, name: str, theirs: Site | None, ours: Site | None) -> str:
    trained = f"with {theirs[0]}" if theirs else "without a correction"
    built = f"with {ours[0]}" if ours else "without one"
    message = (
        f"{source}: {name} was trained {trained} but this model is built {built}, which would change what it computes. "
    )
    if ours is None:
        return (
            message
            + "Give the backbone the same `conditioning`, or fold the checkpoint's correction into its weights first: "
            "tools/model_converters/fold.py."
        )
    return message + (
        "Set `preserve_function=True` in the `conditioning` dict to subtract the difference from the loaded weights; "
        "if the file lost its metadata but was trained with this very correction, "
        "set `trained_with_conditioning=True` in init_cfg."
    )

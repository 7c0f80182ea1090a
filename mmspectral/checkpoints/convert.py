"""Turn checkpoint files into other files: other names, folded, unfolded, published."""

import copy
import datetime
import functools
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor

from mmspectral.checkpoints.files import Weights, find_weights, read_checkpoint, write_checkpoint
from mmspectral.checkpoints.names import FAMILIES, Family, Naming, detect, from_mmpretrain, naming_of, to_mmpretrain
from mmspectral.checkpoints.reconcile import fold_weights, model_sites, noted_sites, unfold_weights
from mmspectral.compat.checkpoints import refusal_reason
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError, UsageError
from mmspectral.layers import METADATA_KEY, Correction

TARGETS = ("mmpretrain", "mmdet", "timm", "official", "mmseg")
KEPT = ("meta",)  # beside the weights


def _explained(function: Callable) -> Callable:
    """Turn what a user can correct into a UsageError."""

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except UsageError:
            raise
        except UnsafeCheckpointError as error:
            reason = refusal_reason(error.__cause__)
            raise UsageError(f"The file is not read, because reading it may run code from it: {reason}.") from error
        except (ValueError, OSError, DamagedCheckpointError) as error:
            raise UsageError(str(error)) from error

    return guarded


@_explained
def convert(source: str, target: Path, to: str, family: str | None = None, force: bool = False) -> str:
    """Write a checkpoint under the names of another code base.

    A file for mmpretrain holds a classifier, ``backbone.`` and ``head.``; one
    for mmdet its backbone alone, under ``backbone.``; the others bare names.

    Args:
        source: Path or URL.
        target: File to write, ``.pth`` or ``.safetensors``.
        to: One of :data:`TARGETS`.
        family: Of the backbone, a key of :data:`mmspectral.checkpoints.names.FAMILIES`; found out if None.
        force: Whether ``target`` is replaced.

    Returns:
        One sentence on what was done.

    Raises:
        UsageError: The names are of no known code base, the family has no such
            naming, or other code would drop a correction or DARK attention;
            ``target`` is there and ``force`` is False.
    """
    if to not in TARGETS or family not in (None, *FAMILIES):
        raise UsageError(f"--to is one of {', '.join(TARGETS)}, --family one of {', '.join(FAMILIES)}.")
    loaded = read_checkpoint(source, trust=False)
    weights = find_weights(loaded, source)
    found, naming, backbone, outside = _split(weights, source, family)
    # A head beside the names of a bare backbone, as every other code base has it.
    heads = {name: backbone.tensors.pop(name) for name in list(backbone.tensors) if name.startswith("head.")}
    state = backbone.tensors
    if to in ("mmpretrain", "mmdet"):
        entry = "state_dict"
        state = {f"backbone.{name}": tensor for name, tensor in found.complete(state).items()}
        metadata = {f"backbone.{name}".removesuffix("."): entry for name, entry in backbone.metadata.items()}
        rest = heads | outside if to == "mmpretrain" else {}
        result = Weights(state | rest, metadata)
    else:
        corrected = [name for name, entry in weights.metadata.items() if METADATA_KEY in entry]
        if corrected:
            raise UsageError(
                f"{source}: {len(corrected)} weights, such as {corrected[0]}, have a correction that code with {to} "
                "names does not know. Fold the file first: tools/model_converters/fold.py."
            )
        features = [name for name in state if ".kernel." in name]
        if features:
            raise UsageError(
                f"{source}: {len(features)} tensors, such as {features[0]}, are of DARK attention, which code with "
                f"{to} names does not have; it would compute softmax attention with weights trained without it."
            )
        rest = heads | {name: tensor for name, tensor in outside.items() if name.startswith("head.")}
        wanted = naming_of(found, to)
        entry = wanted.entry
        result = Weights(from_mmpretrain(state | rest, wanted), {})
    left_out = len(heads) + len(outside) - len(rest)
    write_checkpoint(_with_rest(loaded, result.state_dict(), entry), target, force)
    origin = naming.name if naming else "mmpretrain"
    text = f"{target}: {len(result.tensors)} tensors of a {found.name}, from the names of {origin} to those of {to}"
    return text + (f"; {left_out} tensors outside the backbone left out." if left_out else ".")


@_explained
def fold_file(source: str, target: Path, force: bool = False) -> str:
    """Write W + C in the place of W, for code that knows no corrections.

    Raises:
        UsageError: No weight of the file has a correction that can be folded;
            ``target`` is there and ``force`` is False.
    """
    loaded = read_checkpoint(source, trust=False)
    weights = find_weights(loaded, source)
    folded = fold_weights(weights, source)
    if not folded:
        raise UsageError(f"{source}: no weight is noted to have a correction; the file is folded, or lost the note.")
    write_checkpoint(_with_rest(loaded, weights.state_dict()), target, force)
    return f"{target}: {folded} corrections folded into their weights."


@_explained
def unfold_file(cfg: Config, source: str, target: Path, force: bool = False) -> str:
    """Write W = W' - C in the place of W', the inverse of :func:`fold_file`.

    Raises:
        UsageError: The model has no correction; a weight is missing, has a
            correction already, or is the W + C of no W; ``target`` is there and
            ``force`` is False.
    """
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        model = MODELS.build(copy.deepcopy(cfg.model))
    sites = {name: site for name, site in model_sites(model).items() if isinstance(site[0], Correction)}
    if not sites:
        raise UsageError("the config's model has no corrections that could be subtracted.")
    loaded = read_checkpoint(source, trust=False)
    weights = find_weights(loaded, source)
    unfold_weights(weights, sites, source)
    write_checkpoint(_with_rest(loaded, weights.state_dict()), target, force)
    return f"{target}: corrections subtracted from {len(sites)} weights."


@_explained
def publish(source: str, target: Path, fold: bool = False, force: bool = False) -> Path:
    """Write what others need of a training checkpoint, with a hash in its name.

    Weights and ``meta`` are kept; optimizer, schedulers and message hub are not.
    A correction that is stored as a tensor is folded into its weight.

    Args:
        source: Path or URL.
        target: File to write; eight digits of its SHA-256 are put before the suffix, after a date.
        fold: Whether the other corrections are folded too.
        force: Whether a file of the resulting name is replaced.

    Returns:
        The file written.

    Raises:
        UsageError: Only some corrections are stored, and ``fold`` is False; the
            file is there and ``force`` is False.
    """
    loaded = read_checkpoint(source, trust=False)
    weights = find_weights(loaded, source)
    notes = noted_sites(weights, source)
    stored = [name for name in notes if (f"{name}." if name else "") + "correction" in weights.tensors]
    if fold or stored:
        if len(stored) < len(notes) and not fold:
            raise UsageError(
                f"{source}: only {len(stored)} of {len(notes)} corrections are stored; pass --fold for all."
            )
        fold_weights(weights, source)
    state = weights.state_dict()
    low = sorted({str(t.dtype) for t in state.values() if t.is_floating_point() and t.dtype.itemsize < 4})
    if low:
        print_log(
            f"{source}: weights in {', '.join(low)} are published as they are; float32 is what was trained.",
            "current",
            logging.WARNING,
        )
    temporary = target.with_name(f".{target.name}.unhashed{target.suffix}")
    write_checkpoint(_with_rest(loaded, state), temporary, force=True)
    try:
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()[:8]
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")
        final = target.with_name(f"{target.stem}_{date}-{digest}{target.suffix}")
        if final.exists() and not force:
            raise UsageError(f"{final} is there already; pass --force to replace it.")
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def _split(
    weights: Weights, source: str, family: str | None
) -> tuple[Family, Naming | None, Weights, dict[str, Tensor]]:
    """Return family, naming, the backbone (and a bare head) in mmpretrain's names, and the other tensors."""
    for prefix in ("backbone.", ""):
        inside = weights.under(prefix)
        found = detect(inside.tensors, family)
        if found is not None:
            outside = {name: tensor for name, tensor in weights.tensors.items() if not name.startswith(prefix)}
            if found[1] is not None:
                inside.tensors = to_mmpretrain(inside.tensors, found[1])
            return *found, inside, outside
    raise UsageError(
        f"{source}: the names, such as {', '.join(list(weights.tensors)[:3])}, are of no code base known for "
        f"{family or ', '.join(FAMILIES)}."
    )


def _with_rest(loaded: object, state: OrderedDict[str, Tensor], entry: str = "state_dict") -> dict:
    kept = {key: loaded[key] for key in KEPT if isinstance(loaded, Mapping) and key in loaded}
    return {entry: state, **kept}

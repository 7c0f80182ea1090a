"""Load a checkpoint into a backbone or a whole model: read, rename, reconcile, load, and report what matched."""

import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mmengine.logging import print_log
from torch import Tensor, nn

from mmspectral.checkpoints.files import Weights, find_weights, read_checkpoint, without_wrappers
from mmspectral.checkpoints.names import FAMILIES, detect, to_mmpretrain
from mmspectral.checkpoints.reconcile import (
    check_numbers,
    compare_depths,
    model_sites,
    reconcile,
    unaccounted,
    unknown_message,
)
from mmspectral.errors import UsageError

PREFIXES = ("", "backbone.")
MIN_MATCHED = 0.9  # of the parameters; with less, a file is taken to fill a part of the model
# The backbones fit these to their own grid or window as they load them.
RESIZED = ("relative_position_bias_table", "pos_embed")
_DERIVED = ("relative_position_index", "num_batches_tracked", ".attn_mask")  # no weights: recomputed, or a counter


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Args:
        matched: Parameters (by count of numbers) taken from the file.
        total: Parameters of the backbone.
        missing: Names of the backbone that the file does not have.
        unused: Names of the file's backbone that the model does not have.
        resized: Names of position embeddings and bias tables that were resized.
        skipped: Names outside the backbone that were not loaded, such as heads.
        naming: Whose names the file has, such as ``"timm xcit"``.
        entry: Key of the file under which the weights stood, "" for the top.
    """

    matched: int
    total: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    naming: str = ""
    entry: str = ""

    @property
    def share(self) -> float:
        """Share of the backbone's parameters that were matched, in [0, 1]."""
        return self.matched / self.total if self.total else 1.0

    def __str__(self) -> str:
        text = f"matched {self.matched:,} of {self.total:,} parameters ({100 * self.share:.1f} %)"
        text += f" from {self.entry!r}" if self.entry else ""
        text += f", names of {self.naming}" if self.naming else ""
        lists = (
            ("resized", self.resized),
            ("not in the file", self.missing),
            ("in the file but not used", self.unused),
        )
        for label, names in lists:
            if names:
                text += f"; {label}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        if self.skipped:
            parts = Counter(name.partition(".")[0] for name in self.skipped)
            text += f"; skipped: {', '.join(f'{part} ({count} tensors)' for part, count in parts.items())}"
        return text


def load_backbone(
    backbone: nn.Module,
    checkpoint: str | os.PathLike,
    prefix: str | None = None,
    trained_with_conditioning: bool | None = None,
    min_matched: float = MIN_MATCHED,
    entry: str | None = None,
    trust: bool | None = None,
) -> LoadReport:
    """Load a checkpoint file into a backbone, or raise.

    The state dict may stand at the top of the file or under one of
    :data:`mmspectral.checkpoints.files.ENTRIES`, with names that are bare
    or start with ``backbone.``, behind any number of ``module.`` and
    ``_orig_mod.``. They may be mmpretrain's, or those of timm, of the official
    code, or mmsegmentation's (:mod:`mmspectral.checkpoints.names`). Position
    embeddings and bias tables are resized.

    A file tells by its metadata under which correction each projection was
    trained. Where that differs from the correction of ``backbone``, the function
    would change; with ``preserve_function`` set in the ``conditioning`` dict the
    difference of the two is subtracted from the weights, otherwise this raises.

    Args:
        backbone: Module to fill, in place.
        checkpoint: Path or URL.
        prefix: Prefix of the backbone's names in the file; found out if None.
        trained_with_conditioning: Overrides the metadata, for files that lost
            it: True means "with the backbone's own correction", False "without".
        min_matched: Share of the parameters that must be matched. Below 0.9 the file
            is taken to fill a part; else every name of a backbone of mmspectral
            must also be accounted for: in both, cut, or new to softmax weights.
        entry: Key of the state dict in the file; found out if None.
        trust: Whether code in the file may be run, see :func:`mmspectral.checkpoints.read_checkpoint`.

    Returns:
        What was matched.

    Raises:
        ValueError: The file holds no state dict, a shape differs, too little
            matched, or a correction would change the function.
    """
    checkpoint = os.fspath(checkpoint)
    weights = find_weights(read_checkpoint(checkpoint, trust), checkpoint, entry)
    weights, _, report = _fit(backbone, weights, checkpoint, prefix, min_matched)
    own = backbone.state_dict()
    dtypes = {name: tensor.dtype for name, tensor in own.items()}
    reconcile(weights, model_sites(backbone), dtypes, checkpoint, trained_with_conditioning)
    weights.tensors = {name: weights.tensors[name] for name in own if name in weights.tensors}
    try:
        backbone.load_state_dict(weights.state_dict(), strict=False)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{checkpoint}: {' '.join(str(error).split())}") from error
    print_log(f"{checkpoint}: {report}.", "current", logging.INFO)
    return report


def fit_to_model(
    model: nn.Module, checkpoint: Mapping, source: str, min_matched: float = MIN_MATCHED
) -> tuple[Weights, LoadReport]:
    """Bring the weights of a file under the names of a whole detector or classifier, or raise.

    What does not fit outside the backbone, such as the head for another number
    of classes, is left out and listed as skipped. Weights that do not say under
    which correction they were trained are accepted with a warning.

    Args:
        model: With its backbone as ``model.backbone``, or a backbone itself.
        checkpoint: What was read from the file.
        source: Name of the file, for messages.
        min_matched: Share of the backbone's parameters that must be matched.

    Returns:
        The weights, ready for ``model.load_state_dict(weights.state_dict(),
        strict=False)``, and what was matched.

    Raises:
        ValueError: As for :func:`load_backbone`.
    """
    place = "backbone." if isinstance(getattr(model, "backbone", None), nn.Module) else ""
    backbone = model.get_submodule(place.removesuffix("."))
    inside, outside, report = _fit(backbone, find_weights(checkpoint, source), source, None, min_matched)
    own = model.state_dict()
    fitting = {n: t for n, t in outside.tensors.items() if place and n in own and own[n].shape == t.shape}
    check_numbers(model, fitting, source)
    report = replace(report, skipped=tuple(name for name in outside.tensors if name not in fitting))
    tensors = {f"{place}{name}": tensor for name, tensor in inside.tensors.items()}
    metadata = {f"{place}{name}".removesuffix("."): entry for name, entry in inside.metadata.items()}
    weights = Weights(tensors | fitting, outside.metadata | metadata, report.entry)
    dtypes = {name: tensor.dtype for name, tensor in own.items()}
    sites = model_sites(model)
    if unknown := reconcile(weights, sites, dtypes, source, accept_unknown=True):
        message = unknown_message(source, sites[unknown[0]][0], unknown[0], len(unknown) - 1)
        print_log(message, "current", logging.WARNING)
    print_log(f"{source}: backbone {report}.", "current", logging.INFO)
    return weights, report


def _fit(
    backbone: nn.Module, weights: Weights, source: str, prefix: str | None, min_matched: float
) -> tuple[Weights, Weights, LoadReport]:
    """Return weights under the names of a backbone, the rest under those of a mmpretrain classifier, and a report."""
    own = backbone.state_dict()
    family = detect(own)
    prefixes = PREFIXES if prefix is None else (without_wrappers(f"{prefix}.".replace("..", ".").lstrip(".")),)
    candidates = [_rename(weights, prefix, family and family[0].name, source) for prefix in prefixes]
    found, outside, naming = max(candidates, key=lambda candidate: sum(name in candidate[0].tensors for name in own))
    parameters = dict(backbone.named_parameters())
    # A head that stands beside the names of a bare backbone belongs to the classifier.
    heads = [name for name in found.tensors if name not in own and name.partition(".")[0].startswith("head")]
    outside.tensors |= {name: found.tensors.pop(name) for name in heads}
    state = found.tensors
    report = LoadReport(
        matched=sum(p.numel() for name, p in parameters.items() if name in state),
        total=sum(p.numel() for p in parameters.values()),
        missing=tuple(name for name in own if name not in state and not name.endswith(_DERIVED)),
        unused=tuple(name for name in state if name not in own and not name.endswith(_DERIVED)),
        resized=tuple(n for n in own if n in state and n.endswith(RESIZED) and own[n].shape != state[n].shape),
        skipped=tuple(outside.tensors),
        naming=naming,
        entry=weights.entry,
    )
    depths = compare_depths(backbone, state)
    if report.share < min_matched or any(theirs > ours for theirs, ours in depths.values()):
        raise ValueError(_too_little(backbone, report, weights, found, source, min_matched, depths))
    wrong = [name for name in own if name in state and not _fits(name, state[name], own[name])]
    if wrong:
        shapes = "; ".join(f"{n}: file {_kind(state[n])}, model {_kind(own[n])}" for n in wrong[:8])
        raise ValueError(f"{source}: {len(wrong)} shapes differ from {type(backbone).__name__}'s ({shapes}).")
    lacking, left = unaccounted(backbone, found, report.missing, report.unused)
    if min_matched >= MIN_MATCHED and (lacking or left):
        raise ValueError(
            f"{source}: {report}. {type(backbone).__name__} would compute something else than these weights were "
            f"trained for, by {', '.join((lacking + left)[:3])}. Give it the settings of the model in the file, or set "
            f"`min_matched` below {MIN_MATCHED} in init_cfg if it shall be filled in part."
        )
    check_numbers(backbone, {name: state[name] for name in own if name in state}, source)
    return found, outside, report


def _rename(weights: Weights, prefix: str, family: str | None, source: str) -> tuple[Weights, Weights, str]:
    """Return what stands under ``prefix`` in mmpretrain's names, the rest, and whose names they were."""
    inside = weights.under(prefix)
    outside = Weights(
        {name: tensor for name, tensor in weights.tensors.items() if not name.startswith(prefix)},
        {name: entry for name, entry in weights.metadata.items() if not f"{name}.".startswith(prefix)},
    )
    found = detect(inside.tensors, family) if family else None
    if found is None or found[1] is None:
        return inside, outside, ""
    try:
        inside.tensors = to_mmpretrain(inside.tensors, found[1])
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return inside, outside, f"{found[1].name} {found[0].name}"


def _fits(name: str, tensor: Tensor, own: Tensor) -> bool:
    if tensor.is_floating_point() != own.is_floating_point():
        return False
    if tensor.shape == own.shape or name.endswith("relative_position_index"):  # which goes with the table
        return True
    side = math.isqrt(tensor.shape[-2]) if tensor.ndim == own.ndim > 1 else 0
    resizable = name.endswith(RESIZED) and side and tensor.shape[-1] == own.shape[-1]
    return resizable and (name.rpartition(".")[2] == "pos_embed" or side**2 == tensor.shape[-2])


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}" if tensor.is_floating_point() else f"{tuple(tensor.shape)} of {tensor.dtype}"


def _too_little(
    backbone: nn.Module,
    report: LoadReport,
    weights: Weights,
    found: Weights,
    source: str,
    min_matched: float,
    depths: Mapping[str, tuple[int, int]],
) -> str:
    name = type(backbone).__name__
    foreign = next((other for prefix in PREFIXES if (other := detect(weights.under(prefix).tensors))), None)
    family = detect(backbone.state_dict())
    if foreign and family and foreign[0] is not family[0]:
        cause = f"The file holds a {foreign[0].name}, and {name} is a {family[0].name}."
    elif report.matched and depths:
        counts = (f"{theirs} in {part} and {name} {ours}" for part, (theirs, ours) in depths.items())
        cause = f"The file is of another depth, with {'; '.join(counts)}: state its `arch`."
    elif report.matched:
        cause = "The file holds a smaller or another model: state its `arch`, or lower `min_matched` in init_cfg."
    else:
        known = "; ".join(
            f"{name} from mmpretrain, {', '.join(naming.name for naming in family.namings)}"
            for name, family in FAMILIES.items()
        )
        cause = f"Its names are of no code base known here ({known}): give the right `prefix`, or rename them."
    if report.share >= min_matched:
        return f"{source}: {report}. {cause}"
    return (
        f"{source}: {report}. At least {100 * min_matched:.0f} % must match, so the rest would stay random. Names in "
        f"the file begin like {_examples(found.tensors or weights.tensors)}, in {name} like "
        f"{_examples(backbone.state_dict())}. {cause}"
    )


def _examples(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in list(names)[:3]) or "nothing"


def fit_whole(
    model: nn.Module, checkpoint: Mapping, source: str, min_matched: float = 0.9
) -> tuple[Weights, LoadReport]:
    """Fit weights to a model that is not trained any further, as :func:`fit_to_model` does, with its heads.

    Raises:
        UsageError: The file does not fit, or lacks a weight outside the backbone, which would stay random.
    """
    try:
        weights, report = fit_to_model(model, checkpoint, source, min_matched)
    except ValueError as error:
        raise UsageError(str(error)) from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    absent = [name for name in shapes if name not in weights.tensors and not name.startswith("backbone.")]
    if isinstance(getattr(model, "backbone", None), nn.Module) and absent:
        given = find_weights(checkpoint, source).tensors
        there = f"{tuple(given[absent[0]].shape)} in the file" if absent[0] in given else "not in the file"
        raise UsageError(
            f"{source}: {len(absent)} weights are not there in the shape of the model, and would be random, such as "
            f"{absent[0]}: {there}, {shapes[absent[0]]} in the model. Take the config that it was trained with."
        )
    return weights, report

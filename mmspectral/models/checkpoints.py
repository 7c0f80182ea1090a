"""Load backbone weights loudly: what matched, what did not, and under which correction it was trained."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

from mmspectral.compat.checkpoints import FORCE_UNSAFE, load_from_http, load_from_local
from mmspectral.layers import METADATA_KEY, Correction, build_conditioning, conditioned_projections
from mmspectral.ops import ProjectionLayout

PREFIXES = ("", "backbone.", "module.", "module.backbone.")


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Args:
        matched: Parameters (by count of numbers) taken from the file.
        total: Parameters of the module.
        missing: Names of the module that the file does not have.
        unused: Names of the file that the module does not have.
    """

    matched: int
    total: int
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        text = f"matched {self.matched:,} of {self.total:,} parameters ({100 * self.matched / self.total:.1f} %)"
        for label, names in (("not in the file", self.missing), ("in the file but not used", self.unused)):
            if names:
                text += f"; {label}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        return text


def load_backbone(
    backbone: nn.Module,
    checkpoint: str,
    prefix: str | None = None,
    trained_with_conditioning: bool | None = None,
    min_matched: float = 0.9,
) -> LoadReport:
    """Load a checkpoint file into a backbone, or raise.

    Understands a bare state dict and one under ``state_dict`` or ``model``, with
    names that are bare or start with ``backbone.`` or ``module.``.

    A file tells by its metadata under which correction each projection was
    trained. Where that differs from the correction of ``backbone``, the function
    would change; with ``preserve_function`` set in the ``conditioning`` dict the
    difference of the two is taken off the weights, otherwise this raises.

    Args:
        backbone: Module to fill, in place.
        checkpoint: Path or URL.
        prefix: Prefix of the backbone's names in the file; found out if None.
        trained_with_conditioning: Overrides the metadata, for files that lost
            it: True means "with the backbone's own correction", False "without".
        min_matched: Share of the parameters that must be matched.

    Returns:
        What was matched.

    Raises:
        ValueError: The file holds no state dict, a shape differs, too little
            matched, or a correction would change the function.
    """
    state, metadata = _state_dict(_read(checkpoint), checkpoint)
    prefix = _find_prefix(backbone, state) if prefix is None else prefix
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    metadata = {name.removeprefix(prefix): entry for name, entry in metadata.items()}
    parameters = dict(backbone.named_parameters())
    own = backbone.state_dict()
    report = LoadReport(
        matched=sum(p.numel() for name, p in parameters.items() if name in state),
        total=sum(p.numel() for p in parameters.values()),
        missing=tuple(name for name in own if name not in state),
        unused=tuple(name for name in state if name not in own),
    )
    if report.matched < min_matched * report.total:
        raise ValueError(
            f"{checkpoint}: {report}. At least {100 * min_matched:.0f} % must match, so the rest would stay random. "
            f"Names in the file begin like {_examples(state or {prefix: None})}, in {type(backbone).__name__} like "
            f"{_examples(own)}. Give the right `prefix`, convert the names, or lower `min_matched` in init_cfg."
        )
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    if wrong:
        shapes = "; ".join(f"{n}: file {tuple(state[n].shape)}, model {tuple(own[n].shape)}" for n in wrong[:8])
        raise ValueError(f"{checkpoint}: {len(wrong)} shapes differ from {type(backbone).__name__}'s ({shapes}).")
    changed = _keep_function(backbone, state, metadata, trained_with_conditioning, checkpoint)
    backbone.load_state_dict({name: state[name] for name in own if name in state}, strict=False)
    print_log(f"{checkpoint}: {report}.", "current", logging.INFO)
    if changed:
        print_log(f"{checkpoint}: {changed} weights shifted by their correction to keep the function.", "current")
    return report


def _read(source: str) -> object:
    if source.startswith(("http://", "https://")):
        return load_from_http(source, map_location="cpu")
    if "://" in source or os.environ.get(FORCE_UNSAFE) == "1":  # mmengine's other stores; --trust-checkpoint
        return CheckpointLoader.load_checkpoint(source, map_location="cpu")
    return load_from_local(source, map_location="cpu")


def _state_dict(loaded: object, source: str) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """Unwrap a checkpoint into tensors by name and metadata by module name."""
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        keys = ", ".join(map(str, list(loaded)[:8])) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise ValueError(
            f"{source} holds no state dict: expected tensors by name, at the top or under "
            f"'state_dict' or 'model', found {keys}."
        )
    tensors = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    return tensors, {f"{name}." if name else "": entry for name, entry in getattr(loaded, "_metadata", {}).items()}


def _find_prefix(backbone: nn.Module, state: Mapping[str, Tensor]) -> str:
    names = set(backbone.state_dict())
    return max(PREFIXES, key=lambda prefix: sum(prefix + name in state for name in names))


def _examples(names: Mapping) -> str:
    return ", ".join(repr(name) for name in list(names)[:3]) or "nothing"


def _keep_function(
    backbone: nn.Module,
    state: dict[str, Tensor],
    metadata: Mapping[str, dict],
    trained_with_conditioning: bool | None,
    source: str,
) -> int:
    """Replace, in ``state``, W of the file by W + C_file - C_model where the two corrections differ."""
    changed = 0
    wanted = set(backbone.state_dict())
    own = conditioned_projections(backbone)
    if trained_with_conditioning is None:
        foreign = {name: _from_metadata(metadata.get(f"{name}.", {}), source) for name in _modules_of(state)}
    else:
        foreign = {name: (m.correction, m.layout) for name, m in own.items()} if trained_with_conditioning else {}
    for name in sorted(set(own) | {name for name, found in foreign.items() if found}):
        key = f"{name}.weight"
        if key not in state or key not in wanted:
            continue
        ours = (own[name].correction, own[name].layout) if name in own else None
        theirs = foreign.get(name)
        if ours == theirs:
            continue
        if ours is None or not ours[0].preserve_function:
            raise ValueError(_mismatch_message(source, name, theirs, ours))
        weight = state[key].double() if state[key].dtype.itemsize >= 4 else state[key].float()
        weight = weight if theirs is None else theirs[0].corrected(weight, theirs[1])
        state[key] = ours[0].uncorrected(weight, ours[1]).to(own[name].weight.dtype)
        changed += 1
    return changed


def _modules_of(state: Mapping[str, Tensor]) -> set[str]:
    return {name.removesuffix(".weight") for name in state if name.endswith(".weight")}


def _from_metadata(entry: Mapping, source: str) -> tuple[Correction, ProjectionLayout] | None:
    if METADATA_KEY not in entry:
        return None
    settings = dict(entry[METADATA_KEY])
    try:
        layout = ProjectionLayout(**settings.pop("layout"))
        return build_conditioning(settings), layout
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source} was trained with a correction that cannot be built here: {error}") from error


def _mismatch_message(source: str, name: str, theirs: tuple | None, ours: tuple | None) -> str:
    trained = f"with {theirs[0]}" if theirs else "without a correction"
    built = f"with {ours[0]}" if ours else "without one"
    message = (
        f"{source}: {name} was trained {trained} but this backbone is built {built}, "
        "which would change what it computes. "
    )
    if ours is None:
        return (
            message
            + "Give the backbone the same `conditioning`, or fold the checkpoint's correction into its weights first."
        )
    return message + (
        "Set `preserve_function=True` in the `conditioning` dict to subtract the difference from the loaded weights; "
        "if the file lost its metadata but was trained with this very correction, "
        "set `trained_with_conditioning=True` in init_cfg."
    )

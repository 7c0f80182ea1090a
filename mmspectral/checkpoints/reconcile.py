"""Compare the corrections that weights were trained under with those of the model that loads them."""

import logging
from collections.abc import Mapping

from mmengine.logging import print_log
from torch import Tensor, nn

from mmspectral.checkpoints.files import Weights
from mmspectral.layers import METADATA_KEY, Conditioning, Correction, build_conditioning
from mmspectral.ops import ProjectionLayout

Site = tuple[Conditioning, ProjectionLayout]


def keep_function(
    model: nn.Module,
    weights: Weights,
    source: str,
    trained_with_conditioning: bool | None = None,
    accept_unknown: bool = False,
) -> int:
    """Replace W by W + C_file - C_model where the two corrections differ and the model's settings allow it.

    Changes the tensors in ``weights`` and brings its metadata in line.

    Args:
        model: What is going to load them, with the same names.
        weights: From :func:`mmspectral.checkpoints.files.find_weights`.
        source: Name of the file, for messages.
        trained_with_conditioning: Overrides the metadata; see
            :func:`mmspectral.checkpoints.load.load_backbone`.
        accept_unknown: Whether weights without a note of a correction are taken
            as they are, with a warning: they may be stock weights or may have
            lost the note.

    Returns:
        Number of weights changed.

    Raises:
        ValueError: The model would compute something else than it was trained for.
    """
    own = {
        name: (module.conditioning, module.layout)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "conditioning", None), Conditioning)
    }
    wanted = set(model.state_dict())
    if trained_with_conditioning is None:
        trained = {name: _from_metadata(entry, source) for name, entry in weights.metadata.items()}
    else:
        trained = own if trained_with_conditioning else {}
    changed, unknown = 0, []
    for name in sorted(set(own) | {name for name, found in trained.items() if found}):
        key = f"{name}.weight"
        if key not in weights.tensors or key not in wanted:
            continue
        ours, theirs = own.get(name), trained.get(name)
        if ours != theirs:
            if _can_convert(theirs, ours):
                C = weights.tensors.pop(f"{name}.correction", None)
                dtype = model.get_submodule(name).weight.dtype
                weights.tensors[key] = _converted(weights.tensors[key], C, theirs, ours).to(dtype)
                changed += 1
            elif theirs is None and not isinstance(ours[0], Correction):
                continue  # no C to take off: these alternatives start from stock weights as they are
            elif theirs is None and accept_unknown:
                unknown.append(name)
                continue
            else:
                raise ValueError(_mismatch_message(source, name, theirs, ours))
        weights.metadata[name] = {**weights.metadata.get(name, {}), **_note(ours)}
    if changed:
        print_log(f"{source}: {changed} weights shifted by their correction to keep the function.", "current")
    if unknown:
        print_log(
            f"{source} does not say under which correction {unknown[0]} and {len(unknown) - 1} more weights were "
            f"trained. They are taken to be W of W + C with {own[unknown[0]][0]}. If they are stock weights the model "
            "now computes something else: load them through init_cfg, or set preserve_function=True.",
            "current",
            logging.WARNING,
        )
    return changed


def _can_convert(theirs: Site | None, ours: Site | None) -> bool:
    preserves = ours is not None and getattr(ours[0], "preserve_function", False)
    return preserves and (theirs is None or isinstance(theirs[0], Correction))


def _converted(weight: Tensor, C: Tensor | None, theirs: Site | None, ours: Site) -> Tensor:
    """Return W of the model from W of the file; ``C`` is the file's where it is stored."""
    weight = weight.double() if weight.dtype.itemsize >= 4 else weight.float()
    if C is not None:
        weight = weight + C
    elif theirs is not None:
        weight = theirs[0].corrected(weight, theirs[1])
    return ours[0].uncorrected(weight, ours[1])


def _note(site: Site) -> dict:
    conditioning, layout = site
    return {METADATA_KEY: dict(conditioning.settings(), layout=layout.as_dict())}


def _from_metadata(entry: Mapping, source: str) -> Site | None:
    if METADATA_KEY not in entry:
        return None
    settings = dict(entry[METADATA_KEY])
    try:
        layout = ProjectionLayout(**settings.pop("layout"))
        return build_conditioning(settings), layout
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source} was trained with a correction that cannot be built here: {error}") from error


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

"""Find, refresh, fold and unfold conditioned projections in any ``nn.Module``."""

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.layers.base import Conditioning, build_conditioning
from mmspectral.layers.corrections import Correction
from mmspectral.layers.projection import METADATA_KEY, ConditionedLinear
from mmspectral.layers.switched_linear import SwitchedLinear
from mmspectral.ops import ProjectionLayout

# What is needed to unfold a projection; C itself where it does not follow from W + C.
Sites = dict[str, tuple[Correction, ProjectionLayout] | tuple[Correction, ProjectionLayout, Tensor]]


def condition_linear(
    parent: nn.Module,
    name: str,
    conditioning: Conditioning | None,
    roles: tuple[str, ...],
    num_heads: int,
    row_order: str,
) -> None:
    """Put a conditioned projection, with the same parameters, in the place of ``parent.name``.

    Does nothing when ``conditioning`` is None or targets none of ``roles``.

    Args:
        parent: Module that holds the projection.
        name: Attribute name of an ``nn.Linear``.
        conditioning: What is done to it.
        roles: Which of q, k, v the weight holds, in row order.
        num_heads: Number of heads.
        row_order: See :class:`mmspectral.ops.ProjectionLayout`.
    """
    if conditioning is None or not set(roles) & set(conditioning.targets):
        return
    layout = ProjectionLayout(roles, num_heads, row_order)
    setattr(parent, name, conditioning.replace(getattr(parent, name), layout))


def conditioned_projections(model: nn.Module) -> dict[str, ConditionedLinear]:
    """Return the conditioned projections of ``model`` by name, in module order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ConditionedLinear)}


def replaced_projections(model: nn.Module) -> dict[str, ConditionedLinear | SwitchedLinear]:
    """Return the projections of ``model`` that compute something else than a plain one with their weights, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ConditionedLinear) or (isinstance(module, SwitchedLinear) and module.changes_function)
    }


def stored_corrections(model: nn.Module) -> dict[str, ConditionedLinear]:
    """Return the conditioned projections whose C is a buffer, by name, in module order."""
    return {name: module for name, module in conditioned_projections(model).items() if module.conditioning.stored}


def refresh_corrections(model: nn.Module, updates: int | None = None) -> int:
    """Find the stored corrections of ``model`` again from its weights, in place.

    Call it before each forward pass that begins an update of the optimizer,
    with the number of updates so far; or without that number when the weights
    of a copy were averaged or written by hand.

    Args:
        model: Any module.
        updates: Projections whose interval does not divide it are left as they
            are; None refreshes all.

    Returns:
        How many were refreshed.
    """
    refreshed = 0
    for module in stored_corrections(model).values():
        module.has_refresher = module.has_refresher or updates is not None
        if updates is None or updates % module.conditioning.interval == 0:
            module.refresh()
            refreshed += 1
    return refreshed


def fold(model: nn.Module) -> Sites:
    """Write what each projection computes with into plain ``nn.Linear``s, in place.

    The model then computes the same function with nothing of this package in
    it, and its ``state_dict`` loads into stock code. Besides W + C this takes
    every other module that has a method ``folded()``.

    Returns:
        The sites of corrections by module name; :func:`unfold` takes them back.

    Raises:
        ValueError: ``model`` itself is a conditioned projection; use its
            ``folded()``. Or weights are sharded. The model is left as it was.
    """
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "folded")}
    if "" in modules:
        raise ValueError("fold works on a model that contains conditioned projections; call .folded() on a single one.")
    for parameter in (p for module in modules.values() for p in module.parameters() if p.dim() == 2):
        ops.require_whole(parameter)
    _warn_of_low_precision(p for module in modules.values() for p in module.parameters())
    sites = {name: _site(module) for name, module in modules.items() if isinstance(module, ConditionedLinear)}
    folded = {name: module.folded() for name, module in modules.items()}
    for name, module in folded.items():
        _replace(model, name, module)
    return sites


def unfold(model: nn.Module, sites: Sites) -> None:
    """Undo :func:`fold`, in place: each named ``nn.Linear`` becomes a conditioned projection of weight W - C.

    Args:
        model: A folded (or stock) model.
        sites: What :func:`fold` returned.

    Raises:
        ValueError: A named module is missing, already conditioned or not an
            ``nn.Linear``, or its weight is not W + C of any W (possible where C
            follows from W). The model is left as it was.
    """
    modules = dict(model.named_modules())
    for name in sites:
        if name not in modules or type(modules[name]) is not nn.Linear:
            raise ValueError(f"cannot unfold {name!r}: expected an nn.Linear there, found {modules.get(name)!r}.")
    weights = {name: unfolded_weight(name, modules[name].weight.detach(), *site) for name, site in sites.items()}
    for name, (conditioning, layout, *C) in sites.items():
        linear = modules[name]
        with torch.no_grad():
            linear.weight.copy_(weights[name])
        projection = conditioning.replace(linear, layout)
        if conditioning.stored and C:
            projection.correction.copy_(C[0])
        _replace(model, name, projection)


def folded_state_dict(state_dict: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
    """Fold a saved state dict, without a model: W + C under the name of W, and no stored ``correction``.

    Args:
        state_dict: With the metadata that ``state_dict()`` and ``torch.save``
            keep; it says which weights have a correction.

    Returns:
        A new dict, for stock code or to publish; other tensors are shared.

    Raises:
        ValueError: A weight was trained with something that is no correction,
            or its stored C is missing.
    """
    folded, metadata = OrderedDict(state_dict), OrderedDict(getattr(state_dict, "_metadata", {}))
    changed = []
    for name, entry in metadata.items():
        if METADATA_KEY not in entry:
            continue
        metadata[name] = {key: value for key, value in entry.items() if key != METADATA_KEY}
        settings = dict(entry[METADATA_KEY])
        layout = ProjectionLayout(**settings.pop("layout"))
        conditioning = build_conditioning(settings)
        prefix = f"{name}." if name else ""
        W, C = folded[f"{prefix}weight"], folded.pop(f"{prefix}correction", None)
        if not isinstance(conditioning, Correction) or (conditioning.stored and C is None):
            raise ValueError(
                f"cannot fold {name!r}, trained with {conditioning}: it is no correction, or its tensor "
                f"'{prefix}correction' is missing. Load it into the model and use fold(model)."
            )
        folded[f"{prefix}weight"] = W + C.to(W.dtype) if conditioning.stored else conditioning.corrected(W, layout)
        changed.append(W)
    _warn_of_low_precision(changed)
    folded._metadata = metadata
    return folded


def _warn_of_low_precision(weights: Iterable[Tensor]) -> None:
    low = sorted({str(weight.dtype) for weight in weights if weight.dtype.itemsize < 4})
    if low:
        warnings.warn(
            f"folding C into weights of {', '.join(low)} rounds away the learned diagonal beside it; "
            "fold in float32 and cast afterwards only if you measured that it does no harm.",
            stacklevel=3,
        )


def _site(module: ConditionedLinear) -> tuple:
    conditioning, layout = module.conditioning, module.layout
    if conditioning.invertible and not conditioning.stored:
        return conditioning, layout
    return conditioning, layout, module.correction_matrix().detach().clone()


def unfolded_weight(
    name: str, weight: Tensor, conditioning: Correction, layout: ProjectionLayout, C: Tensor | None = None
) -> Tensor:
    W = conditioning.uncorrected(weight, layout) if C is None else (weight - C).to(weight.dtype)
    if conditioning.stored and C is not None:
        return W
    again = conditioning.corrected(W, layout)
    tolerance = 1e3 * torch.finfo(weight.dtype).eps * weight.abs().max()
    if (again - weight).abs().max() > tolerance:
        raise ValueError(
            f"cannot unfold {name!r}: no W was found whose W + C is this weight, with {conditioning}. "
            "Either its condition number is above 2, or the weight was changed after folding."
        )
    return W


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)

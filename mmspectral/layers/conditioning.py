"""Find, fold and unfold conditioned projections in any ``nn.Module``."""

import warnings

import torch
from torch import nn

from mmspectral.layers.base import Conditioning
from mmspectral.layers.corrections import Correction
from mmspectral.layers.projections import ConditionedLinear
from mmspectral.ops import ProjectionLayout

Sites = dict[str, tuple[Correction, ProjectionLayout]]


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


def fold(model: nn.Module) -> Sites:
    """Write W + C into plain ``nn.Linear``s, in place.

    The model then computes the same function with nothing of this package in
    it, and its ``state_dict`` loads into stock code.

    Returns:
        The conditioned sites by module name; :func:`unfold` takes them back.

    Raises:
        ValueError: ``model`` itself is a conditioned projection; use its
            ``folded()``.
    """
    projections = conditioned_projections(model)
    if "" in projections:
        raise ValueError("fold works on a model that contains conditioned projections; call .folded() on a single one.")
    sites = {name: (module.correction, module.layout) for name, module in projections.items()}
    low = sorted({str(m.weight.dtype) for m in projections.values() if m.weight.dtype.itemsize < 4})
    if low:
        warnings.warn(
            f"folding C into weights of {', '.join(low)} rounds away the learned diagonal beside it; "
            "fold in float32 and cast afterwards only if you measured that it does no harm.",
            stacklevel=2,
        )
    for name, module in projections.items():
        _replace(model, name, module.folded())
    return sites


def unfold(model: nn.Module, sites: Sites) -> None:
    """Undo :func:`fold`, in place: each named ``nn.Linear`` becomes a conditioned projection of weight W - C.

    Args:
        model: A folded (or stock) model.
        sites: What :func:`fold` returned.

    Raises:
        ValueError: A named module is missing, already conditioned or not an ``nn.Linear``.
    """
    modules = dict(model.named_modules())
    for name in sites:
        if name not in modules or type(modules[name]) is not nn.Linear:
            raise ValueError(f"cannot unfold {name!r}: expected an nn.Linear there, found {modules.get(name)!r}.")
    for name, (correction, layout) in sites.items():
        linear = modules[name]
        with torch.no_grad():
            linear.weight.copy_(correction.uncorrected(linear.weight, layout))
        _replace(model, name, correction.replace(linear, layout))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)

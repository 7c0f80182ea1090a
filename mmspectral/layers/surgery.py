"""Condition, fold and unfold the attention projections of any ``nn.Module``: OpenMMLab, timm, transformers, yours."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.arguments import FLAG, checked
from mmspectral.layers.corrections import ConditionedLinear, Correction
from mmspectral.layers.packed_attention import ConditionedMultiheadAttention, weight_layouts
from mmspectral.layers.projection import (
    Conditioning,
    Projection,
    build_conditioning,
    is_shown,
    show_while_running,
    stop_showing,
)
from mmspectral.layers.sites import Site, SiteTable, find_sites, some
from mmspectral.ops import ProjectionLayout

FOLDED = "mmspectral_folded"  # attribute of a folded module: plain data, from which `unfold` restores it
Replaced = Projection | ConditionedMultiheadAttention


def condition_linear(
    parent: nn.Module,
    name: str,
    conditioning: Conditioning | None,
    roles: tuple[str, ...],
    num_heads: int,
    row_order: str = ops.ROW_ORDERS[0],
) -> None:
    """Put a conditioned projection, with the same parameters, in the place of ``parent.name``.

    Does nothing when ``conditioning`` is None or targets none of ``roles``. For
    layers that call their projections; :func:`condition` serves any other.
    """
    if conditioning is None or not set(roles) & set(conditioning.targets):
        return
    layout = ProjectionLayout(roles, num_heads, row_order)
    setattr(parent, name, conditioning.replace(getattr(parent, name), layout))


def condition(
    model: nn.Module,
    conditioning: dict | Conditioning | None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    layout: Mapping | None = None,
    dry_run: bool = False,
) -> nn.Module:
    """Condition the q, k and v projections of a model, in place.

    Names and shapes of its parameters stay, and so do the parameters
    themselves: an optimizer built before goes on working. Which modules are
    found is said in :mod:`mmspectral.layers.sites`; look at them first with
    ``print(mmspectral.sites(model))``. Where one is wrong, the model is left as
    it was. Modules and weights that are shared are conditioned once and stay
    shared.

    With ``preserve_function=True`` in ``conditioning`` C is subtracted from the
    weights that the model has, so that it computes what it did.

    Attention layers that compute with ``qkv.weight`` instead of calling ``qkv``
    read W + C while they run. Forward hooks on the projections are not kept, and
    code outside the attention layer that reads a weight gets W.

    Args:
        model: Any module that contains attention.
        conditioning: What is done, such as ``dict(type='IdentityCorrection',
            scale=1.0)``; with None nothing is.
        include: Patterns of names such as ``"blocks.*.attn"``, see
            :func:`mmspectral.layers.sites.find_sites`.
        exclude: Patterns to leave out.
        layout: ``dict`` of ``num_heads``, ``row_order`` and ``roles`` for what the
            names do not tell.
        dry_run: Removed.

    Returns:
        ``model``.

    Raises:
        ValueError: Nothing found, or a site that cannot be conditioned so.
        TypeError: ``dry_run`` is given.
    """
    if dry_run:
        raise TypeError("condition() has no dry run any more: print(mmspectral.sites(model)) shows what it would find.")
    conditioning = build_conditioning(conditioning)
    if conditioning is None:
        return model
    table = find_sites(model, include, exclude, layout)
    if table.left_out:
        listed = [f"{name} ({reason})" for name, reason in table.left_out.items()]
        warnings.warn(f"{type(model).__name__}: left out are {some(listed)}.", stacklevel=2)
    found = [site for site in table if set(site.roles) & set(conditioning.targets)]
    replacements = {site.name: _replacement(model, site, conditioning) for site in found}
    _check_sharing(model, table, replacements, conditioning)
    preserve_function = getattr(conditioning, "preserve_function", False)
    if preserve_function and any(p.is_meta for module in replacements.values() for p in module.parameters()):
        raise ValueError("preserve_function subtracts C from weights, and those on the meta device are not there yet.")
    _install(model, replacements, shown=True)
    if preserve_function:
        _preserve_function(model.get_submodule(site.name) for site in found)
    return model


def sites(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    layout: Mapping | None = None,
) -> SiteTable:
    """Return the attention projections of a model: those that :func:`condition` finds, and those it conditioned.

    Returns:
        A list of :class:`mmspectral.layers.sites.Site` that prints as a table.

    Raises:
        ValueError: There are none.
    """
    done = [
        Site(name, "conditioned", module.layout.roles, module.layout.num_heads, _rows(module), module.layout.row_order)
        for name, module in _replaced(model).items()
    ]
    try:
        found = find_sites(model, include, exclude, layout)
        return SiteTable([*done, *found], found.left_out)
    except ValueError:
        if done and include is None and exclude is None and layout is None:
            return SiteTable(done)
        raise


@checked(keep=FLAG)
def fold(model: nn.Module, keep: bool = True) -> nn.Module:
    """Write what each projection computes with into stock modules, in place.

    The model then computes the same function with no class of this package in
    it, and its ``state_dict`` loads into stock code. Besides W + C this takes
    every other module that has a method ``folded()``.

    Args:
        model: A conditioned model; one that is not stays as it is.
        keep: Whether folded modules keep what :func:`unfold` needs, as plain data
            under the attribute ``mmspectral_folded``, which copies and pickles
            have and state dicts have not. False for export.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` itself is a conditioned projection; use its
            ``folded()``. Or the conditioning cannot be folded, or weights are
            sharded. The model is left as it was.
    """
    replaced = {name: module for name, module in model.named_modules() if hasattr(module, "folded")}
    if "" in replaced:
        raise ValueError("fold works on a model that contains conditioned projections; call .folded() on a single one.")
    for parameter in (p for module in replaced.values() for p in module.parameters() if p.dim() == 2):
        ops.require_whole(parameter)
    warn_of_low_precision(p for module in replaced.values() for p in module.parameters())
    folded: dict[str, nn.Module] = {}
    tied: dict[tuple, nn.Parameter] = {}
    for name, module in replaced.items():
        stock = folded[name] = module.folded()
        for parameter in corrected_parameters(module):
            key = (_memory(module.own(parameter)), module.conditioning.effect(module.layout))
            setattr(stock, parameter, tied.setdefault(key, getattr(stock, parameter)))
        if keep and corrected_parameters(module):
            setattr(stock, FOLDED, _record(module, is_shown(_owner(model, name)[0])))
    _put(model, folded)
    for module in model.modules():
        if is_shown(module) and not _replaced(module):
            stop_showing(module)
    return model


def unfold(
    model: nn.Module,
    conditioning: dict | Correction | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    layout: Mapping | None = None,
) -> nn.Module:
    """Undo :func:`fold`, in place: weights W + C become W under their correction again.

    Args:
        model: A model that :func:`fold` left; or, with ``conditioning``, one
            whose weights are W + C, such as a stock model with a folded file.
        conditioning: The correction, where the model does not remember it.
        include, exclude, layout: With ``conditioning``, as for :func:`condition`.

    Returns:
        ``model``.

    Raises:
        ValueError: The model remembers no correction and none is given, or a
            weight is not W + C of any W. The model is left as it was.
    """
    replacements, weights, shown = {}, {}, []
    if conditioning is None:
        records = {name: vars(m)[FOLDED] for name, m in model.named_modules() if FOLDED in vars(m)}
        if not records:
            raise ValueError(
                "unfold found nothing that fold has left in this model: it was folded with keep=False, rebuilt from a "
                "state dict, or never folded. Give the correction, such as unfold(model, "
                "dict(type='IdentityCorrection', scale=10.0))."
            )
        for name, record in records.items():
            correction = build_conditioning(record["settings"])
            rows = ProjectionLayout(**record["layout"])
            site = Site(name, "folded", rows.roles, rows.num_heads, 0, rows.row_order)
            replacements[name] = _replacement(model, site, correction)
            weights[name] = _unfolded(name, replacements[name], record["corrections"])
            shown += [name] if record["shown"] else []
    else:
        correction = build_conditioning(conditioning)
        if not isinstance(correction, Correction):
            raise ValueError(f"{correction} is no correction, so that no weight is its W + C.")
        for site in find_sites(model, include, exclude, layout):
            replacements[site.name] = _replacement(model, site, correction)
            weights[site.name] = _unfolded(site.name, replacements[site.name], {})
            shown.append(site.name)
    written: set[tuple] = set()
    for name, module in replacements.items():
        with torch.no_grad():
            for parameter, weight in weights[name].items():
                if _memory(module.own(parameter)) not in written:
                    module.own(parameter).copy_(weight)
                    written.add(_memory(module.own(parameter)))
            if "correction" in module._buffers:
                C = getattr(model.get_submodule(name), FOLDED, {}).get("corrections", {}).get("weight")
                module.refresh()
                if C is not None:
                    module.correction.copy_(C)
                    module.mark()
    _install(model, replacements, shown=False)
    _show(model, shown)
    return model


def conditioned_projections(model: nn.Module) -> dict[str, ConditionedLinear]:
    """Return the conditioned projections of ``model`` by name, in module order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ConditionedLinear)}


def replaced_projections(model: nn.Module) -> dict[str, Projection]:
    """Return the projections of ``model`` that compute something else than a plain one with their weights, by name."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, Projection))
    return {name: module for name, module in found if module.changes_function}


def corrected_parameters(module: nn.Module) -> dict[str, ProjectionLayout]:
    """Return which parameters of a module have a correction, and their rows; empty for other modules."""
    if isinstance(module, ConditionedMultiheadAttention):
        return weight_layouts(module)
    return {"weight": module.layout} if isinstance(module, ConditionedLinear) else {}


def stored_corrections(model: nn.Module) -> dict[str, ConditionedLinear]:
    """Return the conditioned projections whose C is a buffer, by name, in module order."""
    return {name: module for name, module in conditioned_projections(model).items() if module.conditioning.stored}


def refresh_corrections(model: nn.Module, updates: int | None = None) -> int:
    """Recompute the stored corrections of ``model`` from its weights, in place.

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


def _replaced(model: nn.Module) -> dict[str, Replaced]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Replaced)}


def _rows(module: Replaced) -> int:
    return module.out_features if isinstance(module, Projection) else 3 * module.embed_dim


def _replacement(model: nn.Module, site: Site, conditioning: Conditioning) -> Replaced:
    """Build what goes to a site; the model is not changed."""
    stock = model.get_submodule(site.name)
    by_head = not isinstance(conditioning, Correction) or conditioning.scope == "head"
    if site.num_heads is None and (by_head or site.layout.heads_first):
        raise ValueError(
            f"{site.name}: the model does not say how many heads it has (no usable num_heads or the like beside the "
            f"projection), and {conditioning} with rows {site.row_order} needs to know. "
            "Give layout=dict(num_heads=...)."
        )
    if isinstance(stock, nn.MultiheadAttention):
        if site.name == "":
            raise ValueError("condition works on a model that contains attention; wrap the layer in an nn.Sequential.")
        if not isinstance(conditioning, Correction) or conditioning.stored:
            raise ValueError(
                f"{site.name}: {conditioning} replaces the forward of a projection, which nn.MultiheadAttention never "
                "calls. Use a correction without a state of its own, such as IdentityCorrection, or leave the layer "
                "out with `exclude`."
            )
        replacement = ConditionedMultiheadAttention(stock, conditioning)
    else:
        replacement = conditioning.replace(stock, site.layout)
    replacement.site = site.name
    return replacement


def _memory(tensor: Tensor) -> tuple:
    """Return what two parameters have in common that are one, or have one memory."""
    return (tensor.data_ptr(), tensor.shape) if not tensor.is_meta and tensor.data_ptr() else (id(tensor),)


def _check_sharing(
    model: nn.Module, table: Iterable[Site], replacements: Mapping[str, Replaced], conditioning: Conditioning
) -> None:
    """Raise ValueError where modules that are one, or have one weight, would be conditioned in different ways."""
    new = {id(model.get_submodule(name)): module for name, module in replacements.items()}
    effects: dict[tuple, tuple[str, object]] = {}

    def compare(key: tuple, name: str, effect: object) -> None:
        first, other = effects.setdefault(key, (name, effect))
        if other != effect:
            raise ValueError(
                f"{first} and {name} are one and the same, and would be conditioned in different ways, or one of them "
                "not at all. Give them weights of their own, or leave both out with `exclude`."
            )

    merges = isinstance(conditioning, Correction)
    for site in table:
        key = (id(model.get_submodule(site.name)), "module")
        compare(key, site.name, conditioning.effect(site.layout) if merges else site.layout)
    for name, module in model.named_modules():
        weights = _weights(new.get(id(module), module))
        for key, parameter in module.named_parameters(recurse=False):
            compare(_memory(parameter), f"{name}.{key}", weights.get(key))


def _weights(module: nn.Module) -> dict[str, object]:
    """Return what is done to each weight of a module that is conditioned."""
    if not isinstance(module, Replaced):
        return {}
    layouts = corrected_parameters(module) or {"weight": module.layout}
    return {name: module.conditioning.effect(layout) for name, layout in layouts.items()}


def _install(model: nn.Module, replacements: Mapping[str, nn.Module], shown: bool) -> None:
    _put(model, replacements)
    if shown:
        _show(model, replacements)
    for module in model.modules():
        # Nested tensors go to kernels that leave C out.
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(below, ConditionedMultiheadAttention) for below in module.modules()
        ):
            module.use_nested_tensor = False


def _put(model: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
    """Replace modules by name, wherever else in the model they are used, too."""
    by_identity = {id(model.get_submodule(name)): module for name, module in replacements.items()}
    for owner in list(model.modules()):
        for child, module in list(owner._modules.items()):
            if id(module) in by_identity:
                setattr(owner, child, by_identity[id(module)])


def _show(model: nn.Module, names: Iterable[str]) -> None:
    """Let every owner of a named module read W + C from it."""
    shown = {id(model.get_submodule(name)) for name in names}
    for owner in list(model.modules()):
        children = [child for child, module in owner._modules.items() if id(module) in shown]
        if children:
            show_while_running(owner, children)


@torch.no_grad()
def _preserve_function(modules: Iterable[nn.Module]) -> None:
    """Subtract C from the weights W, so that W + C is what W was; once from a weight that several share."""
    done: set[tuple] = set()
    for module in modules:
        for name, layout in corrected_parameters(module).items():
            weight = module.own(name)
            if _memory(weight) not in done:
                weight.copy_(module.conditioning.uncorrected(weight, layout))
                done.add(_memory(weight))


def _record(module: ConditionedLinear | ConditionedMultiheadAttention, shown: bool) -> dict:
    correction = module.conditioning
    follows = correction.invertible and not correction.stored
    corrections = {} if follows else {name: C.detach().clone() for name, C in module.correction_matrices().items()}
    return dict(settings=correction.settings(), layout=module.layout.as_dict(), corrections=corrections, shown=shown)


def _unfolded(name: str, module: Replaced, corrections: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: unfolded_weight(f"{name}.{key}", module.own(key).detach(), module.conditioning, rows, corrections.get(key))
        for key, rows in corrected_parameters(module).items()
    }


def unfolded_weight(
    name: str, weight: Tensor, conditioning: Correction, layout: ProjectionLayout, C: Tensor | None = None
) -> Tensor:
    """Return the W of which ``weight`` is W + C.

    Raises:
        ValueError: ``weight`` is W + C of no W.
    """
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


def warn_of_low_precision(weights: Iterable[Tensor]) -> None:
    """Warn that folding into float16 or bfloat16 weights cannot be undone."""
    low = sorted({str(weight.dtype) for weight in weights if weight.dtype.itemsize < 4})
    if low:
        warnings.warn(
            f"folding C into weights of {', '.join(low)} computes what the model computes, but rounds away the part of "
            "W beside C: unfold cannot restore it. To train on, keep the unfolded file.",
            stacklevel=3,
        )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child

"""Condition, fold and unfold a model that is not ours: timm, torchvision, transformers, OpenMMLab, your own."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mmspectral.layers import surgery as linear_sites
from mmspectral.layers.base import Conditioning, build_conditioning
from mmspectral.layers.corrections import Correction
from mmspectral.layers.packed_attention import SEPARATE_WEIGHTS, ConditionedMultiheadAttention, weight_layouts
from mmspectral.layers.projection import ConditionedLinear
from mmspectral.layers.sites import Site, find_sites
from mmspectral.layers.weight_readers import WeightReadLinear, forget_readers, reads_attribute
from mmspectral.ops import ProjectionLayout

COLUMNS = ("name", "kind", "roles", "heads", "rows", "layout")


class Sites(dict[str, tuple]):
    """Conditioning and row layout of each site by module name, as :func:`unfold` takes them; prints as a table.

    Args:
        found: The sites.
        conditioning: What is done to them; None in a dry run without one.
    """

    def __init__(self, found: Iterable[Site], conditioning: Conditioning | None) -> None:
        self.found = tuple(found)
        super().__init__({site.name: (conditioning, site.layout) for site in self.found})

    def __str__(self) -> str:
        rows = [COLUMNS]
        for site in self.found:
            kind = f"{site.kind}, weight is read" if site.reads_weight else site.kind
            heads = "?" if site.num_heads is None else str(site.num_heads)
            rows.append((site.name, kind, "".join(site.roles), heads, str(site.rows), site.row_order))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def condition(
    model: nn.Module,
    conditioning: dict | Conditioning | None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    layout: Mapping | None = None,
    dry_run: bool = False,
) -> Sites:
    """Condition the q, k and v projections of a model, in place.

    Names and shapes of its parameters stay, and so do the parameters
    themselves: an optimizer built before goes on working. Which modules are
    found is said in :mod:`mmspectral.layers.sites`; look at them first with
    ``print(condition(model, None, dry_run=True))``. Where one is wrong, the model
    is left as it was.

    With ``preserve_function=True`` in ``conditioning`` C is taken off the weights
    that the model has, so that it computes what it did.

    Forward hooks on the projections are not taken over. Code that reads their
    weights from outside their attention layer is not seen: it gets W, not W + C.

    Args:
        model: Any module that contains attention.
        conditioning: What is done, such as ``dict(type='IdentityCorrection',
            scale=1.0)``; with None nothing is.
        include: Patterns of names such as ``"blocks.*.attn"``, see
            :func:`mmspectral.layers.sites.find_sites`.
        exclude: Patterns to leave out.
        layout: ``dict`` of ``num_heads``, ``row_order`` and ``roles`` for what the
            names do not tell.
        dry_run: Only return the sites.

    Returns:
        The sites; ``str`` gives a table.

    Raises:
        ValueError: Nothing found, or a site that cannot be conditioned so.
    """
    conditioning = build_conditioning(conditioning)
    found = find_sites(model, include, exclude, layout)
    if conditioning is not None:
        found = [site for site in found if set(site.roles) & set(conditioning.targets)]
        for site in found:
            _check(site, conditioning)
    if conditioning is not None and not dry_run:
        installs = [_prepare(model, site.name, site.layout, conditioning, site.reads_weight) for site in found]
        for install in installs:
            install()
        _keep_padding(model)
        if getattr(conditioning, "preserve_function", False):
            for site in found:
                keep_function(model.get_submodule(site.name))
    return Sites(found, conditioning)


def fold(model: nn.Module) -> linear_sites.Sites:
    """Write W + C into the stock modules, in place, as :func:`mmspectral.layers.fold` does.

    Here the sites also hold each ``nn.MultiheadAttention``.

    Returns:
        The conditioned sites by module name; :func:`unfold` takes them back.

    Raises:
        ValueError: ``model`` itself is a conditioned projection, or the
            conditioning cannot be folded.
    """
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, ConditionedMultiheadAttention)}
    sites = linear_sites.fold(model)
    sites.update((name, _site(attention)) for name, attention in attentions.items())
    forget_readers(model)
    return sites


def unfold(model: nn.Module, sites: Mapping[str, tuple]) -> None:
    """Undo :func:`fold`, in place.

    Args:
        model: A folded (or stock) model.
        sites: What :func:`fold` or :func:`condition` returned.

    Raises:
        ValueError: A named module is missing, already conditioned or of another
            kind, or its weight is not W + C of any W.
    """
    modules = dict(model.named_modules())
    packed = {name: sites[name] for name in sites if type(modules.get(name)) is nn.MultiheadAttention}
    unfolded = {name: _unfolded_weights(name, modules[name], *site) for name, site in packed.items()}
    plain = {name: sites[name] for name in sites if name not in packed}
    linear_sites.unfold(model, plain)
    for name, (conditioning, layout, *_) in plain.items():
        owner, child = _owner(model, name)
        if reads_attribute(type(owner), child, "weight"):
            _install_reader(owner, child, conditioning, layout)
    for name, weights in unfolded.items():
        with torch.no_grad():
            for parameter, weight in weights.items():
                getattr(modules[name], parameter).copy_(weight)
        _put(model, name, ConditionedMultiheadAttention(modules[name], sites[name][0]))
    _keep_padding(model)


def _site(attention: ConditionedMultiheadAttention) -> tuple:
    conditioning, layout = attention.conditioning, attention.layout
    return (
        (conditioning, layout) if conditioning.invertible else (conditioning, layout, attention.correction_matrices())
    )


def _unfolded_weights(
    name: str,
    attention: nn.MultiheadAttention,
    conditioning: Correction,
    layout: ProjectionLayout,
    C: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    return {
        parameter: linear_sites.unfolded_weight(
            f"{name}.{parameter}",
            getattr(attention, parameter).detach(),
            conditioning,
            rows,
            None if C is None else C[parameter],
        )
        for parameter, rows in weight_layouts(attention).items()
    }


@torch.no_grad()
def keep_function(module: nn.Module) -> None:
    """Take C off the weights W of a conditioned projection or attention, so that W + C is what W was."""
    for name, layout in corrected_parameters(module).items():
        weight = getattr(module, name)
        weight.copy_(module.conditioning.uncorrected(weight, layout))


def corrected_parameters(module: nn.Module) -> dict[str, ProjectionLayout]:
    """Return which parameters of a module have a correction, and their rows; empty for other modules."""
    if isinstance(module, ConditionedMultiheadAttention):
        return weight_layouts(module)
    return {"weight": module.layout} if isinstance(module, ConditionedLinear) else {}


def _check(site: Site, conditioning: Conditioning) -> None:
    by_head = not isinstance(conditioning, Correction) or conditioning.scope == "head"
    if site.num_heads is None and (by_head or site.row_order == "[heads][3][d]"):
        raise ValueError(
            f"{site.name}: the model does not say how many heads it has (no usable num_heads or the like beside the "
            f"projection), and {conditioning} with rows {site.row_order} needs to know. "
            "Give layout=dict(num_heads=...)."
        )
    if site.kind != "nn.MultiheadAttention" and not site.reads_weight:
        return
    if not isinstance(conditioning, Correction) or conditioning.stored:
        raise ValueError(
            f"{site.name}: {conditioning} replaces the forward of a projection, but this attention layer never calls "
            "one: it reads the weights. Use a correction without a state of its own, such as IdentityCorrection, or "
            "leave the layer out with `exclude`."
        )


def _prepare(
    model: nn.Module, name: str, layout: ProjectionLayout, conditioning: Conditioning, reads_weight: bool
) -> Callable[[], None]:
    """Build what goes to a site and return what puts it there."""
    stock = model.get_submodule(name)
    if isinstance(stock, nn.MultiheadAttention):
        if name == "":
            raise ValueError("condition works on a model that contains attention; wrap the layer in an nn.Sequential.")
        owner, child = _owner(model, name)
        for parameter in ("in_proj_weight", *SEPARATE_WEIGHTS):
            if reads_attribute(type(owner), child, parameter):
                raise ValueError(
                    f"{type(owner).__name__} reads {parameter} of its attention {name!r} instead of calling it, which "
                    "would leave the correction out. Leave it out with `exclude`."
                )
        attention = ConditionedMultiheadAttention(stock, conditioning)
        return lambda: _put(model, name, attention)
    owner, child = _owner(model, name)
    if reads_weight:
        return lambda: _install_reader(owner, child, conditioning, layout)
    replacement = conditioning.replace(stock, layout)
    return lambda: setattr(owner, child, replacement)


def _install_reader(owner: nn.Module, child: str, correction: Correction, layout: ProjectionLayout) -> None:
    setattr(owner, child, WeightReadLinear.from_linear(getattr(owner, child), correction, layout))
    WeightReadLinear.shown_to(owner, child)


def _keep_padding(model: nn.Module) -> None:
    """Keep ``nn.TransformerEncoder`` from nested tensors, which only the kernels that leave C out take."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and _holds_conditioned_attention(module):
            module.use_nested_tensor = False


def _holds_conditioned_attention(model: nn.Module) -> bool:
    return any(isinstance(module, ConditionedMultiheadAttention) for module in model.modules())


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, child = _owner(model, name)
    setattr(owner, child, module)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child

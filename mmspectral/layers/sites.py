"""Find the attention projections of a model that is not ours.

A module is an attention layer, by the names of its children, if it

* is an ``nn.MultiheadAttention``;
* has a fused ``nn.Linear`` named as in ``FUSED``, three times as wide as its
  input, with rows ``[3][heads][d]``, or ``[heads][3][d]`` where the module has
  ``head_first=True`` (timm's MaxxViT);
* has a fused ``nn.Linear`` named ``query_key_value``, whose rows must be told:
  GPT-NeoX and BLOOM have ``[heads][3][d]``;
* has all the ``nn.Linear``s of a line of ``SEPARATE``, such as ``q``, ``k``, ``v``
  or ``q`` and ``kv``. k and v may have fewer heads than q (grouped queries).

The number of heads is the first of ``HEAD_COUNTS`` that the module, or its
``config``, has. Convolutions, transposed projections (``Conv1D`` of GPT-2) and
layers that replace ``nn.Linear.forward`` (quantised, adapted) are not found.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from mmspectral.arguments import SETTINGS, TEXT, checked, listed, optional
from mmspectral.ops import ROW_ORDERS, ProjectionLayout

FUSED = ("qkv", "to_qkv", "qkv_proj", "Wqkv")
FUSED_OF_UNKNOWN_ORDER = "query_key_value"
SEPARATE = (
    {"q": "q", "k": "k", "v": "v"},
    {"to_q": "q", "to_k": "k", "to_v": "v"},
    {"query": "q", "key": "k", "value": "v"},
    {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    {"query_proj": "q", "key_proj": "k", "value_proj": "v"},
    {"linear_q": "q", "linear_k": "k", "linear_v": "v"},
    {"q_lin": "q", "k_lin": "k", "v_lin": "v"},
    {"wq": "q", "wk": "k", "wv": "v"},
    {"q": "q", "kv": "kv"},
    {"to_q": "q", "to_kv": "kv"},
    {"qk": "qk", "v": "v"},
)
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
LAYOUT_KEYS = ("roles", "num_heads", "row_order")


@dataclass(frozen=True)
class Site:
    """One place of a model where q, k or v are projected.

    Args:
        name: Module name of the projection, or of the ``nn.MultiheadAttention``.
        kind: ``"fused"``, ``"separate"``, ``"given"`` (by ``layout``) or
            ``"nn.MultiheadAttention"``; ``"conditioned"`` if it is already.
        roles: What it projects to, in row order.
        num_heads: Heads of each projection; None if the model does not say.
        rows: Rows of the weight (of all three in an ``nn.MultiheadAttention``).
        row_order: As in :class:`mmspectral.ops.ProjectionLayout`.
    """

    name: str
    kind: str
    roles: tuple[str, ...]
    num_heads: int | None
    rows: int
    row_order: str = ROW_ORDERS[0]

    @property
    def layout(self) -> ProjectionLayout:
        """Row layout; of one head where the number is unknown, which is all that scope ``"full"`` needs."""
        return ProjectionLayout(self.roles, self.num_heads or 1, self.row_order)


class SiteTable(list[Site]):
    """Sites that print as a table."""

    def __str__(self) -> str:
        rows = [("name", "kind", "roles", "heads", "rows", "layout")]
        for site in self:
            heads = "?" if site.num_heads is None else str(site.num_heads)
            rows.append((site.name, site.kind, "".join(site.roles), heads, str(site.rows), site.row_order))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


PATTERNS = optional(listed(TEXT))


@checked(include=PATTERNS, exclude=PATTERNS, layout=optional(SETTINGS))
def find_sites(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    layout: Mapping | None = None,
) -> list[Site]:
    """Return the attention projections of ``model``, in module order.

    Args:
        model: Any module.
        include: Patterns (``*`` and ``?`` as in a shell, ``*`` also across dots)
            of the names of sites, or of modules that hold them; None takes all.
        exclude: Patterns of those to leave out.
        layout: What the names do not tell, for all sites: ``num_heads``,
            ``row_order``. With ``roles`` it takes as sites the ``nn.Linear``s that
            ``include`` names, whatever they are called.

    Raises:
        ValueError: No site, a pattern that matches none, or a site that the
            rules cannot read.
    """
    layout = _check_layout(layout)
    if "roles" in layout and not include:
        raise ValueError("layout['roles'] needs `include`: the names of the nn.Linears that hold these roles.")
    used: set[str] = set()
    sites = []
    for name, module in model.named_modules():
        for candidate, child, found in _candidates(name, module, explicit="roles" in layout):
            # Both are evaluated: a pattern counts as used though another one decides.
            excluded = _matches(candidate, exclude, used)
            if (include is None or _matches(candidate, include, used)) and not excluded:
                sites.append(_read_site(candidate, module, child, found, layout))
    unused = [pattern for pattern in (*(include or ()), *(exclude or ())) if pattern not in used]
    if unused or not sites:
        raise ValueError(_nothing_found(model, unused))
    return sites


def _check_layout(layout: Mapping | None) -> dict:
    layout = dict(layout or {})
    layout.pop("_scope_", None)
    unknown = sorted(map(str, set(layout) - set(LAYOUT_KEYS)))
    if unknown:
        raise ValueError(f"layout has no entry {', '.join(unknown)}; it takes {', '.join(LAYOUT_KEYS)}.")
    probe = {"roles": ("q", "k", "v"), "num_heads": 1, **layout}
    ProjectionLayout(**probe)  # raises for a wrong value
    return layout


def _candidates(
    name: str, module: nn.Module, explicit: bool = False
) -> Iterator[tuple[str, str | None, dict[str, str] | None]]:
    """Yield (site name, child name or None, names and roles of its group or None) of one module."""
    prefix = f"{name}." if name else ""
    linear = [child for child, m in module.named_children() if type(m).forward is nn.Linear.forward]
    if explicit:
        yield from ((prefix + child, child, None) for child in linear)
        return
    if isinstance(module, nn.MultiheadAttention):
        yield name, None, None
        return
    yield from (
        (prefix + child, child, {child: "qkv"}) for child in linear if child in (*FUSED, FUSED_OF_UNKNOWN_ORDER)
    )
    for group in SEPARATE:
        if set(group) <= set(linear):
            yield from ((prefix + child, child, group) for child in group)
            return


def _matches(name: str, patterns: Sequence[str] | None, used: set[str]) -> bool:
    hits = [p for p in patterns or () if fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*")]
    used.update(hits)
    return bool(hits)


def _read_site(name: str, module: nn.Module, child: str | None, group: dict[str, str] | None, layout: dict) -> Site:
    if child is None:
        return _read_attention(name, module, layout)
    linear = module.get_submodule(child)
    num_heads = layout.get("num_heads", _head_count(module))
    row_order = layout.get("row_order", ROW_ORDERS[0])
    if group is None:
        return Site(name, "given", tuple(layout["roles"]), num_heads, linear.out_features, row_order)
    roles = tuple(group[child])
    if len(group) > 1:
        num_heads = _heads_of(module, group, child, num_heads)
        return Site(name, "separate", roles, num_heads, linear.out_features, row_order)
    if "row_order" not in layout:
        row_order = _fused_order(name, module, child, linear)
    return Site(name, "fused", roles, num_heads, linear.out_features, row_order)


def _read_attention(name: str, module: nn.MultiheadAttention, layout: dict) -> Site:
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise ValueError(
            f"{name or 'the model'} is a {type(module).__name__}, which replaces the forward of nn.MultiheadAttention: "
            "a correction put there would be lost. Exclude it, or fold the correction if it already has one."
        )
    if layout:
        raise ValueError(
            f"layout={layout} does not apply to {name or 'the model'}: nn.MultiheadAttention says its own. "
            "Condition it in a call of its own, with `include`."
        )
    return Site(name, "nn.MultiheadAttention", ("q", "k", "v"), module.num_heads, 3 * module.embed_dim)


def _fused_order(name: str, module: nn.Module, child: str, linear: nn.Linear) -> str:
    if child == FUSED_OF_UNKNOWN_ORDER:
        raise ValueError(
            f"{name}: the rows of a fused query_key_value lie differently in different models. Give "
            "layout=dict(row_order='[heads][3][d]') for GPT-NeoX and BLOOM, '[3][heads][d]' for all of q, k, v in turn."
        )
    if linear.out_features != 3 * linear.in_features:
        raise ValueError(
            f"{name} projects {linear.in_features} features to {linear.out_features}, not to three times as many, so "
            "it is not clear where q, k and v lie. Give layout=dict(row_order='[3][heads][d]') if it holds the three "
            "in equal parts, or leave it out with `exclude`."
        )
    return ROW_ORDERS[1] if getattr(module, "head_first", False) is True else ROW_ORDERS[0]


def _heads_of(module: nn.Module, group: dict[str, str], child: str, num_heads: int | None) -> int | None:
    """Return the heads of one projection of a group.

    k has as many as fit the width of a head of q, and v as many as k.
    """
    key = next(name for name, roles in group.items() if "k" in roles)
    if num_heads is None or "q" in group[child] or "q" in group[key]:
        return num_heads
    query = next(name for name, roles in group.items() if "q" in roles)
    head, rest = divmod(module.get_submodule(query).out_features, num_heads)
    rows = module.get_submodule(key).out_features // len(group[key])
    return None if rest or rows % head else rows // head


def _head_count(module: nn.Module) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for attribute in HEAD_COUNTS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    return None


def _nothing_found(model: nn.Module, unused: Sequence[str]) -> str:
    there = [candidate for name, module in model.named_modules() for candidate, *_ in _candidates(name, module)]
    if not there:
        return (
            f"{type(model).__name__} has no attention projection that the rules of mmspectral.layers.sites know. "
            "Name its nn.Linears with `include` and say what they hold with layout=dict(roles=['q', 'k', 'v'], "
            "num_heads=...)."
        )
    what = f"the patterns {', '.join(map(repr, unused))} match" if unused else "include and exclude leave"
    more = f" and {len(there) - 8} more" if len(there) > 8 else ""
    return f"{what} no attention projection of {type(model).__name__}, which has {', '.join(there[:8])}{more}."

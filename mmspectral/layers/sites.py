"""Find the attention projections of a model that is not ours.

A module is an attention layer, by the names of its children, if it

* is an ``nn.MultiheadAttention``;
* has a fused ``nn.Linear`` named as in ``FUSED``;
* has all the ``nn.Linear``s of a line of ``SEPARATE``, such as ``q``, ``k``, ``v``
  or ``q`` and ``kv``. k and v may have fewer heads than q (grouped queries).

What its rows hold is known for the classes of ``KNOWN``, said by ``layout``, or
established by :mod:`mmspectral.layers.probe`, which runs a copy of the layer;
where that is inconclusive, the site is an error. The number of heads is the
first of ``HEAD_COUNTS`` that the module, or its ``config``, has.

What looks like a projection and is none of these is listed as left out:
convolutions, transposed projections (``Conv1D`` of GPT-2), layers that replace
``nn.Linear.forward`` (quantised, adapted) and names of no group above.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from mmspectral.arguments import SETTINGS, TEXT, checked, listed, optional
from mmspectral.layers.probe import Inconclusive, establish
from mmspectral.layers.projection import ShowsEffective, require_plain
from mmspectral.ops import ROW_ORDERS, ProjectionLayout

FUSED = ("qkv", "to_qkv", "qkv_proj", "Wqkv", "query_key_value")
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
# Classes whose source says that rows lie as roles, heads, channels ([3][heads][d] where they are fused), by module.
KNOWN = {
    "timm.layers.attention": "Attention AttentionRope",
    "timm.models.beit": "Attention",
    "timm.models.cait": "ClassAttn TalkingHeadAttn",
    "timm.models.convit": "GPSA MHSA",
    "timm.models.davit": "WindowAttention",
    "timm.models.eva": "EvaAttention",
    "timm.models.pvt_v2": "Attention",
    "timm.models.swin_transformer": "WindowAttention",
    "timm.models.swin_transformer_v2": "WindowAttention",
    "timm.models.vision_transformer": "Attention",
    "timm.models.xcit": "XCA",
    "torchvision.models.swin_transformer": "ShiftedWindowAttention ShiftedWindowAttentionV2",
    "mmdet.models.backbones.swin": "WindowMSA",
    "mmpretrain.models.backbones.davit": "DaViTWindowMSA",
    "mmpretrain.models.backbones.xcit": "ClassAttntion XCA",
    "mmpretrain.models.utils.attention": "BEiTAttention MultiheadAttention WindowMSA WindowMSAV2",
    "transformers.models.albert.modeling_albert": "AlbertAttention",
    "transformers.models.beit.modeling_beit": "BeitAttention BeitSelfAttention",
    "transformers.models.bert.modeling_bert": "BertCrossAttention BertSelfAttention",
    "transformers.models.clip.modeling_clip": "CLIPAttention",
    "transformers.models.deberta_v2.modeling_deberta_v2": "DisentangledSelfAttention",
    "transformers.models.deit.modeling_deit": "DeiTAttention DeiTSelfAttention",
    "transformers.models.dinov2.modeling_dinov2": "Dinov2Attention Dinov2SelfAttention",
    "transformers.models.distilbert.modeling_distilbert": "DistilBertSelfAttention",
    "transformers.models.llama.modeling_llama": "LlamaAttention",
    "transformers.models.longformer.modeling_longformer": "LongformerSelfAttention",
    "transformers.models.mistral.modeling_mistral": "MistralAttention",
    "transformers.models.qwen2.modeling_qwen2": "Qwen2Attention",
    "transformers.models.roberta.modeling_roberta": "RobertaCrossAttention RobertaSelfAttention",
    "transformers.models.swin.modeling_swin": "SwinAttention SwinSelfAttention",
    "transformers.models.t5.modeling_t5": "T5Attention",
    "transformers.models.vit.modeling_vit": "ViTAttention ViTSelfAttention",
}
# Those whose fused rows lie as [heads][3][d], or do so where the flag `head_first` says it.
KNOWN_HEADS_FIRST = {
    "transformers.models.bloom.modeling_bloom": "BloomAttention",
    "transformers.models.gpt_neox.modeling_gpt_neox": "GPTNeoXAttention",
}
KNOWN_BY_FLAG = {"timm.models.maxxvit": "AttentionCl"}
_CHANNELS = "it attends among channels by softmax(k^T v), which weighs q: its rows are not q, k and v as named here"
NO_ATTENTION = {
    "timm.models.davit.ChannelAttention": _CHANNELS,
    "mmpretrain.models.backbones.davit.ChannelAttention": _CHANNELS,
}
_NAME = re.compile(r"(^|_)w?(q|k|v|qk|kv|qkv|query|key|value|query_key_value|c_attn)(content|pos)?(_(?!norm)|$)", re.I)


@dataclass(frozen=True)
class Site:
    """One place of a model where q, k or v are projected.

    Args:
        name: Module name of the projection, or of the ``nn.MultiheadAttention``.
        kind: ``"fused"``, ``"separate"``, ``"given"`` (by ``layout``) or
            ``"nn.MultiheadAttention"``; ``"conditioned"`` if it is already.
        roles: What it projects to, in row order.
        num_heads: Heads of each projection; None if that is not certain.
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
    """Sites that print as a table.

    Args:
        sites: The sites.
        left_out: Reason by name of what looks like a projection and is no site.
    """

    def __init__(self, sites: Sequence[Site] = (), left_out: Mapping[str, str] | None = None) -> None:
        super().__init__(sites)
        self.left_out = dict(left_out or {})

    def __str__(self) -> str:
        rows = [("name", "kind", "roles", "heads", "rows", "layout")]
        for site in self:
            heads = "?" if site.num_heads is None else str(site.num_heads)
            rows.append((site.name, site.kind, "".join(site.roles), heads, str(site.rows), site.row_order))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *(f"left out: {name}: {reason}" for name, reason in self.left_out.items())])


PATTERNS = optional(listed(TEXT))


@checked(include=PATTERNS, exclude=PATTERNS, layout=optional(SETTINGS))
def find_sites(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    layout: Mapping | None = None,
) -> SiteTable:
    """Return the attention projections of ``model``, in module order.

    Args:
        model: Any module; it stays as it is.
        include: Patterns (``*`` and ``?`` as in a shell, ``*`` also across dots)
            of the names of sites, or of modules that hold them; None takes all.
        exclude: Patterns of those to leave out.
        layout: What to take as said, for all sites, or by pattern
            (``{"decoder": dict(...)}``): ``num_heads``, ``row_order``. With ``roles``
            it takes as sites the ``nn.Linear``s that the pattern, or ``include``,
            names, whatever they are called.

    Raises:
        ValueError: No site, a pattern that matches none, or a site whose rows
            are not certain.
    """
    layouts = _check_layout(layout, include)
    used: set[str] = set()
    established: dict[tuple, dict] = {}
    table = SiteTable()

    def wanted(name: str) -> bool:
        excluded = _matches(name, exclude, used)  # evaluated in any case: a pattern counts as used
        return (include is None or _matches(name, include, used)) and not excluded

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        groups = dict(_groups(name, module, layouts))
        for child, group in groups.items():
            site = prefix + child if child else name
            said = _said(site, layouts, used)
            if wanted(site):
                table.append(_read_site(site, module, child, group, said, established))
        if not any(groups.values()):
            table.left_out |= {n: why for n, why in _left_out(prefix, module, groups) if wanted(n)}
    unused = [p for p in (*(include or ()), *(exclude or ()), *(layout or ())) if p not in (*used, *LAYOUT_KEYS)]
    if unused or not table:
        raise ValueError(_nothing_found(model, unused, table))
    return table


def _check_layout(layout: Mapping | None, include: Sequence[str] | None) -> dict[str, dict]:
    """Return what is said about rows, by pattern."""
    layout = {key: value for key, value in (layout or {}).items() if key != "_scope_"}
    by_pattern = bool(layout) and all(isinstance(value, Mapping) for value in layout.values())
    if "roles" in layout and not include:
        raise ValueError("layout['roles'] needs `include`: the names of the nn.Linears that hold these roles.")
    if not by_pattern:
        layout = dict.fromkeys(include if "roles" in layout else ["*"], layout) if layout else {}
    for said in layout.values():
        unknown = sorted(map(str, set(said) - set(LAYOUT_KEYS)))
        if unknown:
            raise ValueError(f"layout has no entry {', '.join(unknown)}; it takes {', '.join(LAYOUT_KEYS)}.")
        ProjectionLayout(**{"roles": ("q", "k", "v"), "num_heads": 1, **said})  # raises for a wrong value
    return layout


def _said(name: str, layouts: Mapping[str, dict], used: set[str]) -> dict:
    """Return what the first pattern that matches a site says."""
    hits = [pattern for pattern in layouts if _matches(name, [pattern], used)]
    return dict(layouts[hits[0]]) if hits else {}


def _groups(name: str, module: nn.Module, layouts: Mapping[str, dict]) -> Iterator[tuple[str, dict[str, str] | None]]:
    """Yield the name of each projection of a module and the roles of its group by name, None where they are given."""
    prefix = f"{name}." if name else ""
    # Not named_children(), which names a module that serves as two of them once.
    linear = [child for child, m in module._modules.items() if m is not None and type(m).forward is nn.Linear.forward]
    given = [child for child in linear if "roles" in _said(prefix + child, layouts, set())]
    yield from ((child, None) for child in given)
    if isinstance(module, nn.MultiheadAttention):
        if not given:
            yield "", {}
        return
    if _path(module) in NO_ATTENTION:
        return
    linear = [child for child in linear if child not in given]
    yield from ((child, {child: "qkv"}) for child in linear if child in FUSED)
    for group in SEPARATE:
        if set(group) <= set(linear):
            yield from ((child, group) for child in group)
            return


def _left_out(prefix: str, module: nn.Module, groups: Mapping) -> Iterator[tuple[str, str]]:
    """Yield the names of children that look like projections but are no sites, and why."""
    if isinstance(module, (nn.MultiheadAttention, nn.Linear)):
        return
    for child, found in module.named_children():
        weighted = any(parameter.dim() > 1 for parameter in found.parameters())
        if (
            child in groups
            or not weighted
            or isinstance(found, (ShowsEffective, nn.Embedding))
            or not _NAME.search(child)
        ):
            continue
        if _path(module) in NO_ATTENTION:
            reason = NO_ATTENTION[_path(module)]
        elif type(found).forward is nn.Linear.forward:
            reason = f"a {type(module).__name__} does not have q, k and v under names that are known here"
        elif isinstance(found, nn.Linear):
            reason = f"it is a {_path(found)}, which replaces the forward of nn.Linear"
        elif type(found).__name__ == "Conv1D":
            reason = "it is a Conv1D, whose weight is transposed"
        else:
            reason = f"it is a {type(found).__name__}, not an nn.Linear"
        yield prefix + child, reason


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _matches(name: str, patterns: Sequence[str] | None, used: set[str]) -> bool:
    hits = [p for p in patterns or () if fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*")]
    used.update(hits)
    return bool(hits)


def _read_site(
    name: str, module: nn.Module, child: str, group: dict[str, str] | None, said: dict, established: dict
) -> Site:
    require_plain(name, module if not child else module.get_submodule(child))
    if not child:
        return _read_attention(name, module, said)
    rows = module.get_submodule(child).out_features
    num_heads = said.get("num_heads", _head_count(module))
    row_order = said.get("row_order", ROW_ORDERS[0])
    if group is None:
        return Site(name, "given", tuple(said["roles"]), num_heads, rows, row_order)
    kind = "fused" if len(group) == 1 else "separate"
    heads = {key: _heads_of(module, group, key, num_heads) for key in group}
    if "row_order" in said or (said and len(group[child]) == 1):
        return Site(name, kind, tuple(group[child]), heads[child], rows, row_order)
    known = _known_order(module)
    if known is not None:
        return Site(name, kind, tuple(group[child]), heads[child], rows, known)
    key = _key(module, group, heads)
    if key not in established:
        try:
            established[key] = establish(module, group, heads)
        except Inconclusive as reason:
            raise ValueError(
                f"{name}: what the rows of this {type(module).__name__} hold is not certain, since {reason}. Say it by "
                "layout=dict(row_order=..., num_heads=...) if you know it, or leave the layer out with `exclude`."
            ) from None
    roles, num_heads, row_order = established[key][child]
    return Site(name, kind, roles, num_heads, rows, row_order)


def _known_order(module: nn.Module) -> str | None:
    if "forward" in vars(module):  # replaced in this one instance
        return None
    path, _, name = _path(module).rpartition(".")

    def among(known: Mapping[str, str]) -> bool:
        return name in known.get(path, "").split()

    if among(KNOWN_BY_FLAG) and isinstance(getattr(module, "head_first", None), bool):
        return ROW_ORDERS[module.head_first]
    if among(KNOWN_HEADS_FIRST):
        return ROW_ORDERS[1]
    return ROW_ORDERS[0] if among(KNOWN) or path.startswith("mmspectral.") else None


def _key(module: nn.Module, group: Mapping[str, str], heads: Mapping[str, int | None]) -> tuple:
    """Return what two layers have in common that the probe need not tell apart."""
    scalar = (int, float, bool, str, type(None))
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, scalar)
        or (isinstance(value, (tuple, list)) and all(isinstance(entry, scalar) for entry in value))
    }
    widths = tuple(module.get_submodule(child).weight.shape for child in group)
    below = tuple(type(child) for child in module.modules())
    return below, tuple(group.items()), widths, tuple(heads.items()), repr(plain), id(getattr(module, "config", None))


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


def _nothing_found(model: nn.Module, unused: Sequence[str], table: SiteTable) -> str:
    names = [
        f"{name}.{child}" if name and child else name or child
        for name, module in model.named_modules()
        for child, _ in _groups(name, module, {})
    ]
    if not names:
        listed = [f"{name} ({reason})" for name, reason in table.left_out.items()]
        return (
            f"{type(model).__name__} has no attention projection that the rules of mmspectral.layers.sites know"
            f"{'; left out: ' + some(listed) if listed else ''}. Name its nn.Linears with `include` and say what they "
            "hold with layout=dict(roles=['q', 'k', 'v'], num_heads=...)."
        )
    what = f"the patterns {', '.join(map(repr, unused))} match" if unused else "include and exclude leave"
    return f"{what} no attention projection of {type(model).__name__}, which has {some(names)}."


def some(names: Sequence[str]) -> str:
    """Return a list of names for a message, cut after eight."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

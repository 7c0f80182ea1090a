"""Which modules of a model count as attention projections, how sure that is, and what is said where it is not."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmspectral.layers import condition
from mmspectral.layers import sites as site_table
from mmspectral.layers.alternatives import QKNorm
from mmspectral.layers.sites import find_sites

FIRST, ALTERNATING = "[3][heads][d]", "[heads][3][d]"
PATTERNS = ["{}", "to_{}", "{}_proj", "{}_lin", "w{}", "linear_{}"]


def linears(dim=8, **children):
    """A module of linear layers that is no attention: it cannot be run."""
    return nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in children.items()} | {"out": nn.Linear(dim, dim)})


class Attention(nn.Module):
    """Attention of 2 heads of 4 channels that reads its projections by ``read``."""

    def __init__(self, read, dim=8, num_heads=2, **children):
        super().__init__()
        for name, (inputs, outputs) in (children or dict(qkv=(dim, 3 * dim))).items():
            self.add_module(name, nn.Linear(inputs, outputs))
        self.num_heads = num_heads
        self.read = read
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.read(self, x)  # each [B, heads, N, d]
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def heads(x, n=2):
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def roles_first(attention, x):
    return [heads(part) for part in next(attention.children())(x).chunk(3, -1)]


def heads_first(attention, x):
    return next(attention.children())(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)


def by_flag(attention, x):
    return (heads_first if attention.flag else roles_first)(attention, x)


def values_first(attention, x):
    v, q, k = roles_first(attention, x)
    return q, k, v


def innermost(attention, x):
    return [heads(part) for part in attention.qkv(x).unflatten(-1, (-1, 3)).unbind(-1)]


def wide_values(attention, x):
    """EfficientFormer's 1 : 1 : 4, which is three times as wide as the input by chance."""
    q, k, v = heads(attention.qkv(x)).split([2, 2, 8], -1)
    return q, k, v.unflatten(-1, (2, 4)).sum(-2)


def swapped(attention, x):
    return heads(attention.v(x)), heads(attention.k(x)), heads(attention.q(x))


def gated(attention, x):
    """Qwen3-Next's: half of what is called q is a gate."""
    q, gate = heads(attention.q(x)).chunk(2, -1)
    return q, heads(attention.k(x)), heads(attention.v(x)) * gate.sigmoid()


def separate(names, **kv):
    def read(attention, x):
        outputs = [getattr(attention, name)(x) for name in names]
        outputs = [part for y in outputs for part in (y.chunk(2, -1) if len(outputs) == 2 else [y])]
        q, k, v = outputs if len(outputs) == 3 else (outputs[0], *outputs[2:])
        return heads(q), heads(k, **kv), heads(v, **kv)

    return read


def read_kv(attention, x):
    return heads(attention.q(x)), *(heads(part) for part in attention.kv(x).chunk(2, -1))


def read_qk(attention, x):
    return *(heads(part) for part in attention.qk(x).chunk(2, -1)), heads(attention.v(x))


def described(model, **options):
    return [(s.name, "".join(s.roles), s.num_heads, s.row_order) for s in find_sites(model, **options)]


@pytest.mark.parametrize("name", ["qkv", "to_qkv", "qkv_proj", "Wqkv", "query_key_value"])
@pytest.mark.parametrize(
    ("read", "roles", "row_order"),
    [(roles_first, "qkv", FIRST), (heads_first, "qkv", ALTERNATING), (values_first, "vqk", FIRST)],
)
def test_rows_of_a_fused_projection_are_established(name, read, roles, row_order):
    model = nn.Sequential(Attention(read, **{name: (8, 24)}), nn.Linear(8, 8))
    assert described(model) == [(f"0.{name}", roles, 2, row_order)]


def test_layers_of_one_class_may_differ():
    model = nn.Sequential(*(Attention(by_flag) for _ in range(4)))
    for i, layer in enumerate(model):
        layer.flag = i % 2 == 1
    assert [site.row_order for site in find_sites(model)] == [FIRST, ALTERNATING] * 2


@pytest.mark.parametrize("roles", [*([p.format(r) for r in "qkv"] for p in PATTERNS), ["query", "key", "value"]])
def test_separate_projections(roles):
    model = Attention(separate(roles), **dict.fromkeys(roles, (8, 8)))
    assert described(model) == [(name, role, 2, FIRST) for name, role in zip(roles, "qkv", strict=True)]


def test_pairs_and_grouped_queries():
    model = Attention(read_kv, q=(8, 8), kv=(8, 16))
    assert described(model) == [("q", "q", 2, FIRST), ("kv", "kv", 2, FIRST)]
    model = Attention(read_qk, qk=(8, 16), v=(8, 8))
    assert described(model) == [("qk", "qk", 2, FIRST), ("v", "v", 2, FIRST)]
    model = Attention(separate("qkv", n=1), q=(8, 8), k=(8, 4), v=(8, 4))
    model.config = SimpleNamespace(num_attention_heads=model.num_heads)
    del model.num_heads
    assert described(model) == [("q", "q", 2, FIRST), ("k", "k", 1, FIRST), ("v", "v", 1, FIRST)]
    condition(model, dict(type="IdentityCorrection", scope="head"))
    assert model.k.layout.num_heads == 1 and model.q.layout.num_heads == 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Attention(innermost), "no layout"),
        (Attention(wide_values), "no layout"),
        (Attention(swapped, q=(8, 8), k=(8, 8), v=(8, 8)), "no layout"),
        (Attention(gated, q=(8, 16), k=(8, 8), v=(8, 8)), "no layout"),
        (linears(qkv=(8, 24)), "takes no tokens|does not run"),
    ],
)
def test_what_is_not_certain_is_refused_and_what_is_said_is_taken(model, reason):
    with pytest.raises(ValueError, match=f"not certain, since.*({reason}).*layout=.*exclude"):
        find_sites(model)
    with torch.device("meta"), pytest.raises(ValueError, match="not certain, since.*meta"):
        find_sites(Attention(roles_first))
    if hasattr(model, "qkv"):
        assert described(model, layout=dict(row_order=ALTERNATING, num_heads=2))[0][1:] == ("qkv", 2, ALTERNATING)


def test_a_layer_with_one_wrong_number_of_heads():
    """It says 4 where it has 2: full scope needs no heads, rows that alternate do."""
    model = Attention(roles_first, num_heads=4)
    assert described(model) == [("qkv", "qkv", None, FIRST)]
    for settings in (dict(type="IdentityCorrection", scope="head"), QKNorm()):
        with pytest.raises(ValueError, match=r"heads.*layout=dict\(num_heads=\.\.\.\)"):
            condition(model, settings)
    assert type(model.qkv) is nn.Linear
    condition(model, dict(type="IdentityCorrection", scope="head"), layout=dict(num_heads=2))
    assert model.qkv.layout.num_heads == 2
    with pytest.raises(ValueError, match="not certain"):
        find_sites(Attention(heads_first, num_heads=4))


def test_looking_changes_nothing():
    model = nn.Sequential(Attention(roles_first), nn.Dropout(0.5)).train().bfloat16()
    calls = []
    model[0].qkv.register_forward_hook(lambda *args: calls.append(args))
    before, state, attributes = copy.deepcopy(model.state_dict()), torch.get_rng_state(), dict(vars(model[0]))
    model[0].proj.weight.grad = torch.ones_like(model[0].proj.weight)
    assert len(find_sites(model)) == 1 and not calls
    assert torch.equal(torch.get_rng_state(), state) and vars(model[0]) == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and (model[0].proj.weight.grad == 1).all() and model[0].qkv.weight.grad is None


def test_layouts_by_pattern():
    model = nn.ModuleDict({"a": linears(qkv=(8, 24)), "b": linears(qkv=(8, 24), lin=(8, 16)), "c": linears(lin=(8, 8))})
    layout = {"a": dict(row_order=FIRST), "*.qkv": dict(row_order=ALTERNATING, num_heads=2)}
    assert [site.row_order for site in find_sites(model, layout=layout)] == [FIRST, ALTERNATING]
    given = {"*.lin": dict(roles=["q", "k"]), "c.lin": dict(roles=["v"]), "a": dict(row_order=FIRST)}
    assert described(model, layout=given, exclude=["b.qkv", "c"]) == [
        ("a.qkv", "qkv", None, FIRST),
        ("b.lin", "qk", None, FIRST),
    ]
    with pytest.raises(ValueError, match="'d' match no"):
        find_sites(model, layout=layout | {"d": dict(num_heads=2)})


def test_a_projection_of_any_name_can_be_given():
    model = nn.Sequential(linears(lin=(8, 24)), linears(lin=(8, 24)))
    given = dict(roles=["q", "k", "v"], num_heads=2, row_order=ALTERNATING)
    assert described(model, include=["0.lin"], layout=given) == [("0.lin", "qkv", 2, ALTERNATING)]
    assert [site.name for site in find_sites(model, include=["*.lin"], layout=given)] == ["0.lin", "1.lin"]
    with pytest.raises(ValueError, match="needs `include`"):
        find_sites(model, layout=given)


def test_include_and_exclude():
    model = nn.ModuleDict(
        {part: nn.Sequential(*(Attention(roles_first) for _ in "ab")) for part in ("back", "decoder")}
    )
    every = ["back.0.qkv", "back.1.qkv", "decoder.0.qkv", "decoder.1.qkv"]
    for options, expected in (
        ({}, every),
        (dict(include=["decoder"]), every[2:]),
        (dict(include=["*.0.*"]), every[::2]),
        (dict(exclude=["decoder.1", "back"]), every[2:3]),
        (dict(include=["decoder"], exclude=["*.0"]), every[3:]),
    ):
        assert [site.name for site in find_sites(model, **options)] == expected
    for options, match in (
        # A prefix ends at a dot.
        (dict(include=["decoder", "bac"]), "'bac' match no attention projection of ModuleDict, which has back.0.qkv"),
        (dict(exclude=["neck"]), "'neck' match no"),
        (dict(exclude=["*"]), "include and exclude leave no attention projection"),
        (dict(include="decoder"), "include must be .*a list"),
        (dict(layout=dict(order=FIRST)), "no entry order; it takes roles, num_heads, row_order"),
        (dict(layout=dict(row_order="[d][3]")), "row_order must be one of"),
        (dict(layout=dict(num_heads=0)), "num_heads must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=match):
            find_sites(model, **options)


def test_what_looks_like_a_projection_is_listed_as_left_out():
    class Quantised(nn.Linear):
        def forward(self, x):
            return super().forward(x.round())

    quantised = linears(qkv=(8, 24))
    quantised["qkv"] = Quantised(8, 24)
    conv = nn.ModuleDict({"q": nn.Conv2d(4, 4, 1), "qk_norm": nn.Linear(4, 4)})
    model = nn.ModuleDict({"a": quantised, "b": conv, "c": linears(qcontent_proj=(8, 8), kpos_proj=(8, 8), v=(8, 8))})
    with pytest.raises(ValueError, match=r"no attention projection.*left out: a\.qkv.*roles=\['q', 'k', 'v'\]"):
        find_sites(model)
    model["d"] = Attention(roles_first)
    table = find_sites(model)
    assert list(table.left_out) == ["a.qkv", "b.q", "c.qcontent_proj", "c.kpos_proj", "c.v"]
    assert "replaces the forward" in table.left_out["a.qkv"] and "Conv2d" in table.left_out["b.q"]
    assert "left out: c.v: " in str(site_table(model))
    with pytest.warns(UserWarning, match=r"left out are a\.qkv"):
        condition(model, dict(type="IdentityCorrection"), exclude=["c"])


def test_conditioned_projections_are_no_sites():
    model = Attention(roles_first)
    condition(model, dict(type="IdentityCorrection"))
    with pytest.raises(ValueError, match="has no attention projection"):
        condition(model, dict(type="IdentityCorrection"))
    packed = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    condition(packed, dict(type="IdentityCorrection"))
    with pytest.raises(ValueError, match="replaces the forward of nn.MultiheadAttention.*fold"):
        condition(packed, dict(type="IdentityCorrection"))


def test_multihead_attention():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, kdim=6)})
    (site,) = find_sites(model)
    assert (site.name, site.kind, site.num_heads, site.rows) == ("attn", "nn.MultiheadAttention", 2, 24)
    with pytest.raises(ValueError, match="says its own"):
        find_sites(model, layout=dict(num_heads=4))

    class Masked(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    model["attn"] = Masked(8, 2)
    with pytest.raises(ValueError, match="attn is a Masked, which replaces the forward"):
        find_sites(model)


def test_sites_print_as_a_table():
    model = nn.ModuleDict({"a": Attention(roles_first), "b": nn.MultiheadAttention(6, 3)})
    model["c"] = Attention(separate("qkv"), q=(8, 8), k=(8, 8), v=(8, 8), num_heads=None)
    found = site_table(model)
    lines = str(found).splitlines()
    assert lines[0].split() == ["name", "kind", "roles", "heads", "rows", "layout"]
    assert lines[1].split() == ["a.qkv", "fused", "qkv", "2", "24", FIRST]
    assert lines[2].split() == ["b", "nn.MultiheadAttention", "qkv", "3", "18", FIRST]
    assert lines[3].split() == ["c.q", "separate", "q", "?", "8", FIRST]
    assert [site.name for site in found] == ["a.qkv", "b", "c.q", "c.k", "c.v"]
    condition(model, dict(type="IdentityCorrection", targets=["k"]))
    after = {site.name: site.kind for site in site_table(model)}
    assert [name for name, kind in after.items() if kind == "conditioned"] == ["a.qkv", "b", "c.k"]
    with pytest.raises(ValueError, match="no attention projection"):
        site_table(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_tiny_patch16_224", {"fused": 12}),
        ("swin_tiny_patch4_window7_224", {"fused": 12}),
        ("deit_tiny_distilled_patch16_224", {"fused": 12}),
        ("xcit_nano_12_p16_224", {"fused": 12, "separate": 6}),
        ("beit_base_patch16_224", {"fused": 12}),
        ("swinv2_tiny_window8_256", {"fused": 12}),
        ("davit_tiny", {"fused": 6}),
        ("pvt_v2_b0", {"separate": 16}),
        ("convit_tiny", {"fused": 2, "separate": 20}),
        ("maxvit_rmlp_pico_rw_256", {"fused": 22}),
    ],
)
def test_known_models_need_no_run(name, expected):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
    found = find_sites(model)
    assert {kind: sum(site.kind == kind for site in found) for kind in expected} == expected
    assert len(found) == sum(expected.values())
    assert all(site.num_heads for site in found)
    assert ({site.row_order for site in found} == {ALTERNATING}) == name.startswith("maxvit")
    assert len(found.left_out) == (6 if name == "davit_tiny" else 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tiny_vit_5m_224", ALTERNATING), ("fastvit_sa12", FIRST), ("efficientformer_l1", None), ("levit_128s", None)],
)
def test_other_models_are_run_once(name, expected):
    model = pytest.importorskip("timm").create_model(name)
    if expected is None:
        with pytest.raises(ValueError, match=r"not certain|left out: stages"):
            find_sites(model)
    else:
        assert {site.row_order for site in find_sites(model)} == {expected}

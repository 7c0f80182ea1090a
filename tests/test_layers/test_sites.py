"""Which modules of a model count as attention projections, and what is said where that is not clear."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmspectral.layers import condition
from mmspectral.layers import sites as site_table
from mmspectral.layers.alternatives import QKNorm
from mmspectral.layers.sites import find_sites


class Attention(nn.Module):
    """An attention layer with the given children and attributes; it is never run."""

    def __init__(self, *attributes, **children):
        super().__init__()
        for name, (inputs, outputs) in children.items():
            self.add_module(name, nn.Linear(inputs, outputs))
        for name, value in attributes:
            setattr(self, name, value)

    def forward(self, x):
        return x


def sites(model, **options):
    return [(site.name, "".join(site.roles), site.num_heads) for site in find_sites(model, **options)]


@pytest.mark.parametrize("name", ["qkv", "to_qkv", "qkv_proj", "Wqkv"])
def test_fused_projection(name):
    model = nn.Sequential(Attention(("num_heads", 4), **{name: (8, 24), "proj": (8, 8)}), nn.Linear(8, 8))
    (site,) = find_sites(model)
    assert (site.name, site.kind, site.roles, site.num_heads) == (f"0.{name}", "fused", ("q", "k", "v"), 4)
    assert (site.rows, site.row_order) == (24, "[3][heads][d]")


@pytest.mark.parametrize("pattern", ["{}", "to_{}", "{}_proj", "{}_lin", "w{}", "linear_{}"])
def test_separate_projections(pattern):
    q, k, v = (pattern.format(role) for role in "qkv")
    model = Attention(("n_heads", 2), **{q: (8, 8), k: (6, 8), v: (6, 8), "out": (8, 8)})
    assert sites(model) == [(q, "q", 2), (k, "k", 2), (v, "v", 2)]


@pytest.mark.parametrize("names", [("query", "key", "value"), ("query_proj", "key_proj", "value_proj")])
def test_separate_projections_with_long_names(names):
    model = Attention(("num_attention_heads", 2), **dict.fromkeys(names, (8, 8)))
    assert sites(model) == [(name, role, 2) for name, role in zip(names, "qkv", strict=True)]


def test_pairs():
    assert sites(Attention(("heads", 2), q=(8, 8), kv=(8, 16))) == [("q", "q", 2), ("kv", "kv", 2)]
    assert sites(Attention(("heads", 2), to_q=(8, 8), to_kv=(8, 16))) == [("to_q", "q", 2), ("to_kv", "kv", 2)]
    assert sites(Attention(("num_heads", 2), qk=(8, 8), v=(8, 12))) == [("qk", "qk", 2), ("v", "v", 2)]


def test_grouped_queries_have_fewer_heads_of_k_and_v():
    """The width of a head of q, 32 / 8 = 4, says that 8 rows are two heads."""
    model = Attention(
        ("config", SimpleNamespace(num_attention_heads=8)), q_proj=(32, 32), k_proj=(32, 8), v_proj=(32, 8)
    )
    assert sites(model) == [("q_proj", "q", 8), ("k_proj", "k", 2), ("v_proj", "v", 2)]
    condition(model, dict(type="IdentityCorrection", scope="head"))
    assert model.k_proj.layout.num_heads == 2 and model.q_proj.layout.num_heads == 8


def test_interleaved_rows_are_recognised_or_asked_for():
    (site,) = find_sites(Attention(("num_heads", 2), ("head_first", True), qkv=(8, 24)))
    assert site.row_order == "[heads][3][d]"
    neox = Attention(("num_attention_heads", 2), query_key_value=(8, 24))
    with pytest.raises(
        ValueError, match=r"query_key_value.*layout=dict\(row_order='\[heads\]\[3\]\[d\]'\) for GPT-NeoX"
    ):
        find_sites(neox)
    (site,) = find_sites(neox, layout=dict(row_order="[heads][3][d]"))
    assert site.layout.row_order == "[heads][3][d]" and site.num_heads == 2


def test_a_fused_projection_that_is_not_three_times_as_wide_is_asked_about():
    model = Attention(("num_heads", 2), qkv=(8, 48))
    with pytest.raises(ValueError, match="qkv projects 8 features to 48, not to three times as many.*exclude"):
        find_sites(model)
    assert sites(model, layout=dict(row_order="[3][heads][d]")) == [("qkv", "qkv", 2)]


def test_head_count_is_asked_for_only_where_it_matters():
    model = Attention(qkv=(8, 24))
    assert sites(model) == [("qkv", "qkv", None)]
    for settings in (dict(type="IdentityCorrection", scope="head"), QKNorm()):
        with pytest.raises(ValueError, match=r"does not say how many heads.*layout=dict\(num_heads=\.\.\.\)"):
            condition(model, settings)
    with pytest.raises(ValueError, match="does not say how many heads"):
        condition(model, dict(type="IdentityCorrection"), layout=dict(row_order="[heads][3][d]"))
    assert type(model.qkv) is nn.Linear
    condition(model, dict(type="IdentityCorrection", scope="head"), layout=dict(num_heads=2))
    assert model.qkv.layout.num_heads == 2


def test_a_projection_of_any_name_can_be_given():
    model = nn.Sequential(Attention(lin=(8, 24), out=(8, 8)), Attention(lin=(8, 24)))
    given = dict(roles=["q", "k", "v"], num_heads=2, row_order="[heads][3][d]")
    (site,) = find_sites(model, include=["0.lin"], layout=given)
    assert (site.name, site.kind, site.num_heads) == ("0.lin", "given", 2)
    assert [site.name for site in find_sites(model, include=["*.lin"], layout=given)] == ["0.lin", "1.lin"]
    with pytest.raises(ValueError, match="needs `include`"):
        find_sites(model, layout=given)


def test_include_and_exclude():
    model = nn.ModuleDict(
        {
            part: nn.Sequential(*(Attention(("num_heads", 2), qkv=(8, 24)) for _ in range(2)))
            for part in ("backbone", "decoder")
        }
    )
    every = ["backbone.0.qkv", "backbone.1.qkv", "decoder.0.qkv", "decoder.1.qkv"]
    assert [site.name for site in find_sites(model)] == every
    assert [site.name for site in find_sites(model, include=["decoder"])] == every[2:]
    assert [site.name for site in find_sites(model, include=["*.0.*"])] == every[::2]
    assert [site.name for site in find_sites(model, exclude=["decoder.1", "backbone"])] == every[2:3]
    assert [site.name for site in find_sites(model, include=["decoder"], exclude=["*.0"])] == every[3:]
    # A prefix ends at a dot.
    with pytest.raises(
        ValueError, match="'back' match no attention projection of ModuleDict, which has backbone.0.qkv"
    ):
        find_sites(model, include=["decoder", "back"])
    with pytest.raises(ValueError, match="'neck' match no"):
        find_sites(model, exclude=["neck"])
    with pytest.raises(ValueError, match="include and exclude leave no attention projection"):
        find_sites(model, exclude=["*"])
    with pytest.raises(ValueError, match="list of patterns, got the string"):
        find_sites(model, include="decoder")


def test_no_attention_is_an_error():
    with pytest.raises(ValueError, match=r"Sequential has no attention projection.*roles=\['q', 'k', 'v'\]"):
        find_sites(nn.Sequential(nn.Linear(4, 12)))


def test_what_replaces_the_forward_of_a_projection_is_not_taken():
    class Quantised(nn.Linear):
        def forward(self, x):
            return super().forward(x.round())

    model = Attention(("num_heads", 2))
    model.qkv = Quantised(8, 24)
    with pytest.raises(ValueError, match="has no attention projection"):
        find_sites(model)


def test_conditioned_projections_are_no_sites():
    model = Attention(("num_heads", 2), qkv=(8, 24))
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


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        (dict(order="[3][heads][d]"), "no entry order; it takes roles, num_heads, row_order"),
        (dict(row_order="[d][3]"), "row_order must be one of"),
        (dict(num_heads=0), "at least 1"),
    ],
)
def test_wrong_layout(layout, match):
    with pytest.raises(ValueError, match=match):
        find_sites(Attention(qkv=(8, 24)), layout=layout)


def test_sites_print_as_a_table():
    model = nn.ModuleDict({"a": Attention(("num_heads", 2), qkv=(8, 24)), "b": nn.MultiheadAttention(6, 3)})
    model["c"] = Attention(q=(8, 8), k=(8, 8), v=(8, 8))
    found = site_table(model)
    lines = str(found).splitlines()
    assert lines[0].split() == ["name", "kind", "roles", "heads", "rows", "layout"]
    assert lines[1].split() == ["a.qkv", "fused", "qkv", "2", "24", "[3][heads][d]"]
    assert lines[2].split() == ["b", "nn.MultiheadAttention", "qkv", "3", "18", "[3][heads][d]"]
    assert lines[3].split() == ["c.q", "separate", "q", "?", "8", "[3][heads][d]"]
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
        ("davit_tiny", {"fused": 12}),
        ("pvt_v2_b0", {"separate": 16}),
        ("convit_tiny", {"fused": 2, "separate": 20}),
        ("maxvit_rmlp_pico_rw_256", {"fused": 22}),
    ],
)
def test_sites_of_timm_models(name, expected):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
    found = find_sites(model)
    assert {kind: sum(site.kind == kind for site in found) for kind in expected} == expected
    assert len(found) == sum(expected.values())
    assert all(site.num_heads for site in found)
    assert ({site.row_order for site in found} == {"[heads][3][d]"}) == name.startswith("maxvit")

"""Kernels of attention: what they compute, when their features are drawn, and what calibration may set."""

import copy
import math

import pytest
import torch
from torch import nn

from mmspectral.layers import RandomFeatureKernel, build_kernel, share_geometry
from mmspectral.ops.random_features import Proposal, draw_projection, fold_features, linear_attention

H, D, M = 4, 8, 16
TYPES = dict(
    dark=dict(type="dark", num_features=M),
    dark_layer=dict(type="mmspectral.dark", num_features=M, sharing="layer", rank=3, orthogonal=False),
    dark_sharp=dict(type="dark", num_features=M, proposal="sharp", shift="learned", _scope_="mmspectral"),
    performer=dict(type="performer", num_features=M, shift="fixed"),
    temperature=dict(type="temperature", num_features=M),
    learned=dict(type="learned", num_features=M),
    constant=dict(type="constant", num_features=M),
    uniform=dict(type="uniform"),
    softmax=dict(type="softmax"),
)
ALL = pytest.mark.parametrize("name", TYPES)
RANDOM = [name for name in TYPES if name not in ("uniform", "softmax")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(name="dark", heads=H, **kwargs):
    kernel = build_kernel(TYPES[name] | kwargs, heads, D, layer=2)
    for parameter in kernel.parameters():  # away from the identity, where mix-ups do not show
        nn.init.normal_(parameter, std=0.3) if parameter.dim() < 3 else parameter.data.mul_(0.8)
    return kernel


def tokens(N=9, heads=H, key_heads=H, size=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(N)
    q, k, v = (torch.randn(2, h, N, D, generator=generator) * size for h in (heads, key_heads, key_heads))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@ALL
@pytest.mark.parametrize("N", [1, 7, 33])
def test_every_kernel_is_the_softmax_of_its_logits(name, N):
    kernel, (q, k, v) = build(name), tokens(N)
    logits = kernel.logits(q, k)
    assert logits.shape == (2, H, N, N)
    torch.testing.assert_close(kernel(q, k, v), logits.softmax(-1) @ v, rtol=2e-4, atol=2e-5)
    hidden = torch.ones(N, N).triu(1).bool()
    causal = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(kernel(q, k, v, causal=True), causal, rtol=2e-4, atol=2e-5)


@ALL
def test_constant_values_come_back_and_hidden_keys_do_not_count(name):
    kernel, (q, k, v) = build(name), tokens(12)
    mask = torch.arange(12).expand(2, 12) < torch.tensor([[12], [7]])
    for causal in (False, True):
        constant = kernel(q, k, torch.full_like(v, 0.7), mask, causal)
        torch.testing.assert_close(constant, torch.full_like(v, 0.7), rtol=0, atol=1e-5)
    alone = kernel(q[1:], k[1:, :, :7], v[1:, :, :7])
    torch.testing.assert_close(kernel(q, k, v, mask)[1:], alone, rtol=1e-4, atol=1e-5)


@ALL
@pytest.mark.parametrize("own_heads", [2, 4])
def test_query_heads_share_keys(name, own_heads):
    """With M for each key head, and for each query head."""
    kernel, (q, k, v) = build(name, heads=own_heads), tokens(heads=4, key_heads=2)
    out = kernel(q, k, v)
    repeated = v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, kernel.logits(q, k).softmax(-1) @ repeated, rtol=2e-4, atol=2e-5)
    changed = k.clone()
    changed[:, 1] = changed[:, 1].roll(1, -1)
    different = (kernel(q, changed, v) - out).abs().amax((0, 2, 3)) > 1e-6
    assert different.tolist() == [False, False] + [name not in ("constant", "uniform")] * 2


@ALL
def test_masks(name):
    kernel, (q, k, v) = build(name), tokens(5)
    assert not kernel(q, k, v, torch.zeros(2, 5, dtype=torch.bool)).any(), "who sees no key gets 0"
    for mask, error in (
        (torch.zeros(2, 5), TypeError),  # not added to logits
        (torch.ones(2, 4).bool(), ValueError),
        (torch.ones(5, 5).bool(), ValueError),
        (torch.ones(2, 1, 1, 5).bool(), ValueError),
    ):
        with pytest.raises(error, match="mask must be"):
            kernel(q, k, v, mask)


def test_the_baselines_ignore_the_content():
    q, k, v = tokens()
    for name in ("constant", "uniform"):
        kernel = build(name)
        assert torch.equal(kernel(q, k, v), kernel(3 * k, q, v))
    torch.testing.assert_close(build("uniform")(q, k, v)[:, :, 0], v.mean(2))
    kernel = build("constant")
    first, state = kernel(q, k, v), copy.deepcopy(kernel.state_dict())
    assert not torch.allclose(first, build("uniform")(q, k, v), atol=0.1)
    kernel(*tokens(2000))
    assert torch.equal(kernel(q, k, v), first)
    assert {n: b.shape for n, b in kernel.named_buffers()} == {n: t.shape for n, t in state.items()}


def test_draws_depend_on_seed_layer_and_redraws_alone():
    before = torch.get_rng_state()
    kernel = build_kernel(TYPES["dark"] | dict(seed=1), H, D, layer=3)
    assert torch.equal(kernel.w, draw_projection(M, D, 1, 3, 0))
    kernel.redraw(2)
    kernel(*tokens())
    assert torch.equal(kernel.w, draw_projection(M, D, 1, 3, 2))
    assert torch.equal(before, torch.get_rng_state()), "the global generator must be left alone"


def test_redraws_happen_in_place():
    """DistributedDataParallel would go on with the buffers it knows."""
    kernel = build("dark_sharp")
    before, pointers = kernel.w.clone(), {n: (id(b), b.data_ptr()) for n, b in kernel.named_buffers()}
    kernel.redraw(3)
    kernel.set_geometry(torch.eye(D)[None], Proposal(torch.eye(D)[None], torch.full((1, D), 1.5)))
    assert {n: (id(b), b.data_ptr()) for n, b in kernel.named_buffers()} == pointers
    assert kernel.redraws == 3 and not torch.equal(kernel.w, before)
    kernel.redraw(0)
    assert torch.equal(kernel.w, before)
    trained = build("learned")
    before = trained.w.clone()
    trained.redraw(1)
    assert kernel.draws and not trained.draws and torch.equal(trained.w, before)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_draws_stay_exact_when_the_model_is_cast(name, dtype):
    kernel = build(name)
    buffers = {n: b.clone() for n, b in kernel.named_buffers()}
    pointer = kernel.w.data_ptr()
    q, k, v = tokens(dtype=dtype)
    exact = copy.deepcopy(kernel)(q.float(), k.float(), v.float())
    kernel.to(dtype)
    assert all(torch.equal(b, buffers[n]) and b.dtype == buffers[n].dtype for n, b in kernel.named_buffers())
    assert kernel.w.data_ptr() == pointer or name == "learned"
    assert {p.dtype for p in kernel.parameters()} <= {dtype}
    out = kernel(q, k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)  # parameters were rounded
    assert kernel.double().w.dtype == torch.float64
    kernel(q.double(), k.double(), v.double())


def test_geometry_that_is_set_is_what_is_computed():
    kernel, (q, k, v) = build("dark_sharp"), tokens()
    geometry, shift = 0.5 * torch.randn(H, D, D), torch.randn(H, D)
    proposal = Proposal(torch.linalg.qr(torch.randn(H, D, D)).Q, 0.8 + torch.rand(H, D))
    kernel.set_geometry(geometry, proposal, shift)
    expected = linear_attention(q, k, v, fold_features(kernel.w, geometry, D, None, shift, proposal))
    torch.testing.assert_close(kernel(q, k, v), expected)
    before = copy.deepcopy(kernel.state_dict())
    kernel.set_geometry(shift=torch.zeros(1, D))
    changed = {n for n, t in kernel.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"shift"} and not kernel.shift.any()
    temperature = build("temperature")
    temperature.set_geometry(M=torch.tensor([0.5, 1.0, 2.0, 0.0]))
    scaled = fold_features(temperature.w, temperature.M[:, None, None] * torch.eye(D), D)
    torch.testing.assert_close(temperature(q, k, v), linear_attention(q, k, v, scaled))


def test_the_geometry_starts_at_the_identity_or_at_orthogonal_rows():
    assert torch.equal(RandomFeatureKernel(H, D).M, torch.eye(D).repeat(H, 1, 1))
    M = RandomFeatureKernel(H, D, rank=2).M
    torch.testing.assert_close(M @ M.mT, 4 * torch.eye(2).repeat(H, 1, 1))
    assert RandomFeatureKernel(H, 64).num_features == 266 and RandomFeatureKernel(H, 1).num_features == 1


def test_sharing():
    assert [build("dark", sharing=s).M.shape[0] for s in ("head", "layer", "model")] == [H, 1, 1]
    model = nn.ModuleList([build_kernel(dict(type="dark", sharing="model"), h, D, layer=h) for h in (2, 4)])
    model.append(build("dark"))
    share_geometry(model)
    assert model[0].M is model[1].M is not model[2].M and not torch.equal(model[0].w, model[1].w)
    assert len(list(model.parameters())) == 2
    copied = copy.deepcopy(model)
    assert copied[0].M is copied[1].M is not model[0].M
    other = nn.ModuleList([build_kernel(dict(type="dark", sharing="model"), H, d) for d in (D, 2 * D)])
    with pytest.raises(ValueError, match=r"one shape of M .*\(1, 8, 8\) and \(1, 16, 16\).*use 'layer'"):
        share_geometry(other)


@pytest.mark.parametrize(
    ("cfg", "error", "match"),
    [
        (dict(num_features=8), TypeError, "a string 'type'"),
        (dict(type="drak"), KeyError, "unknown kernel type 'drak'; known: dark, performer"),
        (dict(type="performer", rank=2), TypeError, "performer has no argument 'rank'; it takes .*_delete_"),
        (dict(type="softmax", seed=1), TypeError, "softmax has no argument 'seed'; it takes none"),
        (
            dict(type="dark", num_features=2.5),
            ValueError,
            r"num_features must be .*an integer in \[1, 65536\], got 2.5",
        ),
        (dict(type="dark", rank=9), ValueError, r"rank must be an integer in \[1, 8\], the width of a head, got 9"),
        (dict(type="dark", num_features=10**9), ValueError, r"num_features must be .*an integer in \[1, 65536\]"),
        (dict(type="dark", seed="q"), ValueError, "seed must be an integer, got 'q'"),
        (dict(type="dark", sharing="heads"), ValueError, "sharing must be one of 'head', 'layer', 'model', got 'heads"),
        (dict(type="dark", shift=True), ValueError, "shift must be one of None, 'fixed', 'learned', got True"),
    ],
)
def test_errors_of_settings(cfg, error, match):
    with pytest.raises(error, match=match):
        build_kernel(cfg, H, D)


@pytest.mark.parametrize(
    ("name", "parts", "match"),
    [
        ("performer", dict(M=torch.eye(D)[None]), "this kernel has no M; set geometry"),
        ("dark", dict(shift=torch.zeros(1, D)), "this kernel has no shift"),
        ("dark_layer", dict(M=torch.ones(H, 3, D)), r"M of shape \(4, 3, 8\) does not fit \(1, 3, 8\)"),
        ("dark_sharp", dict(shift=torch.zeros(3, D)), r"shift of shape \(3, 8\) does not fit \(4, 8\)"),
    ],
)
def test_errors_of_geometry(name, parts, match):
    with pytest.raises(ValueError, match=match):
        build(name).set_geometry(**parts)

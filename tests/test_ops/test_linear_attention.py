"""The chunked, recomputing form against the explicit kernel matrix, and what makes it safe to train with."""

import itertools

import pytest
import torch

from mmspectral.ops.random_features import (
    FeatureState,
    causal,
    chunked,
    constant_attention,
    draw_projection,
    fold_features,
    kernel_logits,
    linear_attention,
    position_codes,
    reference,
    sharp_proposal,
    softmax_attention,
    summarise_keys,
    uniform_attention,
)
from mmspectral.ops.random_features.op import plain_forward

F64 = torch.float64


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks, the last one short, at lengths a test can afford."""
    monkeypatch.setattr(chunked, "MIN_CHUNK", 8)
    monkeypatch.setattr(chunked, "CPU_CHUNK_BYTES", 1)
    monkeypatch.setattr(causal, "CHUNK", 8)
    monkeypatch.setattr(causal, "SHORT_CHUNK", 4)
    monkeypatch.setattr(causal, "MAX_CHUNKS", 2)


def tokens(*shape, seed=0, dtype=F64, size=1.0):
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)).to(dtype)


def problem(B=2, h=2, H=2, N=21, L=21, d=5, e=3, m=11, r=5, dtype=F64, size=1.0):
    """q, k, v, M per query head and w."""
    q, k, v = tokens(B, h, N, d, seed=1), tokens(B, H, L, d, seed=2), tokens(B, H, L, e, seed=3)
    leaves = [t.to(dtype).requires_grad_() for t in (size * q, size * k, v, tokens(h, r, d, seed=4) / d**0.5)]
    return leaves, draw_projection(m, r, seed=0, dtype=F64 if dtype == F64 else torch.float32)


def mask_of(B, L):
    mask = torch.rand(B, L, generator=torch.Generator().manual_seed(5)) > 0.4
    mask[:, 0] = True  # a causal query without a key is a case of its own
    return mask


def assert_same(ours, naive, leaves, tolerance=1e-10):
    """Equal values, and equal gradients of all leaves for one random cotangent."""
    torch.testing.assert_close(ours, naive, rtol=tolerance, atol=tolerance)
    cotangent = tokens(*naive.shape, seed=9)
    pairs = (torch.autograd.grad(out, leaves, cotangent) for out in (ours, naive))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1, b.abs().max().item()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("masked", "shifted", "proposed", "trained_w"),
    [case for case in itertools.product([False, True], repeat=4) if sum(case) in (0, 1, 3, 4)],
)
def test_matches_the_explicit_kernel(small_chunks, causal, masked, shifted, proposed, trained_w):
    leaves, w = problem()
    q, k, v, M = leaves
    shift = tokens(2, 5, seed=6).requires_grad_() if shifted else None
    X = tokens(2, 5, 9, seed=7) / 3
    proposal = sharp_proposal(X @ X.mT) if proposed else None
    w = w.expand(2, 11, 5).clone().requires_grad_(trained_w)
    mask = mask_of(2, 21) if masked else None
    features = fold_features(w, M, 5, shift=shift, proposal=proposal, orthogonal=not trained_w)
    ours = linear_attention(q, k, v, features, mask, causal)
    naive = reference.linear_attention(q, k, v, w, M, 5**-0.5, shift, *(proposal or (None, None)), mask, causal)
    assert_same(ours, naive, leaves + [shift] * shifted + [w] * trained_w)


@pytest.mark.parametrize(
    "shape",
    [
        dict(N=13, L=34),
        dict(N=1, L=1),
        dict(B=1, h=4, N=19, L=9),  # grouped queries, M per query head
        dict(h=4, H=1, e=7),
        dict(m=3),  # fewer features than dimensions: no complete block
        dict(r=2),
        dict(d=1, r=1, e=1, m=1),
        dict(N=63, L=63, d=7, r=7, m=30),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_odd_shapes(small_chunks, shape, causal):
    leaves, w = problem(**shape)
    q, k, v, M = leaves
    if causal and q.shape[2] != k.shape[2]:
        with pytest.raises(ValueError, match="as many queries as keys"):
            linear_attention(q, k, v, fold_features(w, M, q.shape[-1]), causal=True)
        return
    features = fold_features(w, M, q.shape[-1], orthogonal=True)
    ours = linear_attention(q, k, v, features, causal=causal)
    heads = w.expand(q.shape[1], *w.shape)
    assert_same(ours, reference.linear_attention(q, k, v, heads, M, q.shape[-1] ** -0.5, causal=causal), leaves)


@pytest.mark.parametrize("M", ["shared", "none", "temperature", "per key head"])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_share_keys_without_repeating_them(small_chunks, M, causal):
    (q, k, v, full), w = problem(h=4, H=2)
    given = dict(shared=full[0], none=None, temperature=torch.tensor(0.5, dtype=F64))
    given = full[:2] if M == "per key head" else given[M]
    expected = dict(shared=full[:1].expand(4, 5, 5), none=torch.eye(5, dtype=F64).expand(4, 5, 5))
    expected |= dict(temperature=0.5 * expected["none"])
    expected = full[:2].repeat_interleave(2, 0) if M == "per key head" else expected[M]
    ours = linear_attention(q, k, v, fold_features(w, given, 5, orthogonal=True), causal=causal)
    naive = reference.linear_attention(q, k, v, w.expand(4, 11, 5), expected, 5**-0.5, causal=causal)
    assert_same(ours, naive, [q, k, v] + [full] * (M in ("shared", "per key head")))


def test_views_as_attention_layers_make_them():
    """q, k, v are strided views of one fused projection, and the gradient comes transposed."""
    x = tokens(2, 19, 3 * 2 * 5).requires_grad_()
    q, k, v = x.view(2, 19, 3, 2, 5).permute(2, 0, 3, 1, 4)
    M, w = tokens(2, 5, 5, seed=4).requires_grad_(), draw_projection(9, 5, seed=0, dtype=F64)
    ours = linear_attention(q, k, v, fold_features(w, M, 5, orthogonal=True)).transpose(1, 2)
    naive = reference.linear_attention(q, k, v, w.expand(2, 9, 5), M, 5**-0.5).transpose(1, 2)
    assert_same(ours, naive, [x, M])


def test_causal_pairs_with_logarithms_of_their_own(small_chunks, monkeypatch):
    """What is done where logits are too far apart, done everywhere."""
    monkeypatch.setattr(causal, "safe_range", lambda dtype: -1.0)
    for all_or_none in (False, True):
        test_matches_the_explicit_kernel(None, True, *[all_or_none] * 4)
    for shape in (dict(N=1, L=1), dict(h=4, H=1, e=7), dict(N=63, L=63, d=7, r=7, m=30)):
        test_odd_shapes(None, shape, True)
    test_queries_that_see_no_key_get_zero_and_no_gradient(None, True)


@pytest.mark.parametrize("far", [40.0, 300.0])
def test_causal_attention_is_as_exact_where_logits_are_far_apart(far):
    """float32 against float64, logits of one feature that differ by ``far`` within a chunk, growing and falling."""
    N, d = 40, 4
    q, v = tokens(1, 2, N, d, seed=1), tokens(1, 2, N, 3, seed=3)
    k = torch.linspace(0, (2 * far) ** 0.5, N, dtype=F64)[:, None] * torch.eye(d, dtype=F64)[0]
    k = torch.stack([k, k.flip(0)])[None] + 0.1 * tokens(1, 2, N, d, seed=2)
    w = draw_projection(16, d, seed=0, dtype=F64)
    exact = reference.linear_attention(q, k, v, w.expand(2, 16, d), torch.eye(d).expand(2, d, d), 1.0, causal=True)
    features = fold_features(w.float(), None, d, scale=1.0, orthogonal=True)
    ours = linear_attention(q.float(), k.float(), v.float(), features, causal=True)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_constant_values_come_back_from_opposite_queries_and_keys(small_chunks, dtype, causal):
    """q = -20 u, k = 20 u: with one maximum for all key features every denominator is 0."""
    d, N = 64, 50
    u = torch.nn.functional.normalize(tokens(d), dim=0)
    noise = [0.1 * tokens(1, 1, N, d, seed=s) for s in (1, 2)]
    q, k = ((sign * 20 * u + x).to(dtype) for sign, x in zip((-1, 1), noise, strict=True))
    v = torch.full((1, 1, N, 3), 1.7, dtype=dtype)
    features = fold_features(draw_projection(128, d, seed=0, dtype=dtype), None, d, scale=1.0, orthogonal=True)
    out = linear_attention(q, k, v, features, causal=causal)
    torch.testing.assert_close(out, v, rtol=0, atol=1e-12 if dtype == F64 else 1e-5)


def test_causal_queries_are_not_disturbed_by_large_later_keys():
    """Later keys of the same chunk that are e^500 larger leave float32 as exact as before."""
    N, d = 32, 4
    q, k, v = (tokens(1, 1, N, d, seed=s) for s in (1, 2, 3))
    k[:, :, N // 2 :] *= 40
    w = draw_projection(16, d, seed=0, dtype=F64)
    exact = reference.linear_attention(q, k, v, w[None], torch.eye(d)[None], 0.5, causal=True)
    features = fold_features(w.float(), None, d, orthogonal=True)
    kappa = kernel_logits(torch.zeros_like(q), k, fold_features(w, None, d))
    assert kappa.max() - kappa[..., : N // 2].max() < kappa.max() - kappa.min() > 200, "the keys must differ enough"
    ours = linear_attention(q.float(), k.float(), v.float(), features, causal=True)
    earlier = slice(0, N // 2)
    torch.testing.assert_close(ours[:, :, earlier].double(), exact[:, :, earlier], rtol=1e-5, atol=1e-5)
    assert ours.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_do_not_count(small_chunks, causal):
    """Their content, even infinite logits, changes nothing, and they get no gradient."""
    (q, k, v, M), w = problem()
    mask = mask_of(2, 21)
    features = fold_features(w, M, 5, orthogonal=True)
    out = linear_attention(q, k, v, features, mask, causal)
    other_k, other_v = (torch.where(mask[:, None, :, None], t, 1e3).detach().requires_grad_() for t in (k, v))
    changed = linear_attention(q, other_k, other_v, features, mask, causal)
    torch.testing.assert_close(changed, out, rtol=1e-12, atol=1e-12)
    for grad in torch.autograd.grad(changed.square().sum(), (other_k, other_v)):
        assert (grad[~mask[:, None, :, None].expand_as(grad)] == 0).all()
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_see_no_key_get_zero_and_no_gradient(small_chunks, causal):
    leaves, w = problem()
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0], mask[1, :12] = False, False
    out = linear_attention(*leaves[:3], fold_features(w, leaves[3], 5, orthogonal=True), mask, causal)
    assert (out[0] == 0).all()
    assert (out[1, :, :12] == 0).all() == causal
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[0] == 0).all() and grad[1].abs().sum() > 0 for grad in grads[:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(dtype, causal):
    """At most twice the error of plain torch given the same inputs in the same precision."""
    (q, k, v, M), w = problem(N=33, L=33, d=32, r=32, m=64, e=32, dtype=dtype)
    exact = reference.linear_attention(q, k, v, w.expand(2, 64, 32), M, 32**-0.5, causal=causal)
    out = linear_attention(q, k, v, fold_features(w, M, 32, orthogonal=True), causal=causal)
    assert out.dtype == dtype
    z, y = (32**-0.25 * x @ M.mT for x in (q, k))
    phi_q, phi_k = ((x @ w.to(dtype).t() - x.square().sum(-1, keepdim=True) / 2).exp() for x in (z, y))
    kernel = phi_q @ phi_k.mT if not causal else (phi_q @ phi_k.mT).tril()
    plain = kernel @ v / kernel.sum(-1, keepdim=True)
    assert (out - exact).norm() <= 2 * (plain - exact).norm()
    assert (out - exact).norm() < 1e-2 * exact.norm()
    cotangent = tokens(*out.shape, seed=9, dtype=dtype)
    grads, exact_grads = (torch.autograd.grad(o, (q, k, v, M), cotangent.to(o.dtype)) for o in (out, exact))
    for ours, right in zip(grads, exact_grads, strict=True):
        assert ours.dtype == dtype
        assert (ours - right).double().norm() < 0.02 * right.double().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [6.0, 1e2, 1e4])
@pytest.mark.parametrize("causal", [False, True])
def test_large_entries_stay_finite(dtype, size, causal):
    """Entries of 6 in 32 dimensions make every unstabilised feature 0, even in float32."""
    q, k, v = (torch.full((1, 2, 9, 32), size, dtype=dtype).requires_grad_() for _ in range(3))
    with torch.no_grad():
        for t in (q, k):
            t[:, :, ::2] *= -1
    features = fold_features(draw_projection(64, 32, seed=0), None, 32, orthogonal=True)
    assert (torch.exp(-(32**-0.5) * q.float().square().sum(-1) / 2) < 1e-40).all()
    out = linear_attention(q, k, v, features, causal=causal)
    torch.testing.assert_close(out, v.detach(), rtol=1e-3, atol=0)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_autocast_and_lower_matmul_precision_change_nothing():
    (q, k, v, M), w = problem(dtype=torch.float32, N=33, L=33)

    def run(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = linear_attention(q, k, v, fold_features(w, M, 5, orthogonal=True))
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, M))

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
    setting = torch.backends.mkldnn.matmul
    previous = setting.fp32_precision
    try:
        setting.fp32_precision = "bf16"
        with chunked.float32_island(q.device):
            assert setting.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert setting.fp32_precision == "bf16", "the user's choice comes back"
    finally:
        setting.fp32_precision = previous


@pytest.mark.parametrize("H", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_a_state_stands_for_the_keys_before(small_chunks, H, causal):
    """Values and gradients, those of the keys before by way of the state too; a mask, and pieces of any length."""
    (q, k, v, M), w = problem(h=2, H=H, N=31, L=31)
    features = fold_features(w, M[:H], 5, shift=tokens(5, seed=6), orthogonal=True)
    mask = mask_of(2, 31)
    whole = linear_attention(q, k, v, features, mask, causal) if causal else linear_attention(q, k, v, features, mask)
    state, pieces = None, []
    for piece in (slice(0, 6), slice(6, 7), slice(7, 31)):
        arguments = k[:, :, piece], v[:, :, piece], features, mask[:, piece]
        if causal or piece.stop == 31:
            pieces.append(linear_attention(q[:, :, piece] if causal else q, *arguments, causal, state))
        state = summarise_keys(*arguments, state)
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=1e-11, atol=1e-12)
    assert state.lse.shape == (2, H, 11) and state.mean.shape == (2, H, 11, 3)

    state = FeatureState(*(tokens(*t.shape, seed=i).requires_grad_() for i, t in enumerate(state)))
    with torch.no_grad():
        state.lse[0, 0, 3] = -torch.inf  # a feature that no key has reached

    def attention(q, k, v, M, lse, mean):
        features = fold_features(w, M[:H], 5, orthogonal=True)
        return linear_attention(q, k, v, features, mask[:, :9], causal, FeatureState(lse, mean))

    leaves = [t[:, :, :9].detach().requires_grad_() for t in (q, k, v)]
    finite = FeatureState(state.lse.detach().nan_to_num(neginf=-3.0).requires_grad_(), state.mean)
    assert torch.autograd.gradcheck(attention, (*leaves, M, *finite))
    grads = torch.autograd.grad(attention(*leaves, M, *state).sum(), state)
    assert all(grad.isfinite().all() for grad in grads) and grads[0][0, 0, 3] == 0


def test_a_state_of_other_sizes_is_refused():
    (q, k, v, M), w = problem()
    features = fold_features(w, M, 5)
    state = summarise_keys(k, v, features)
    with pytest.raises(ValueError, match="must be"):
        linear_attention(q, k, v[..., :2], features, state=state)


@pytest.mark.parametrize("causal", [False, True])
def test_operators_are_well_formed_and_compile_without_a_graph_break(causal):
    (q, k, v, M), w = problem(B=1, N=9, L=9)
    features = fold_features(w, M, 5, shift=tokens(5, seed=8), orthogonal=True)
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in (q.unsqueeze(2), k, v, *features)]
    state = [t.requires_grad_() for t in (tokens(1, 2, 11, seed=10), tokens(1, 2, 11, 3, seed=11))]
    for given in (state, [None, None]):
        torch.library.opcheck(torch.ops.mmspectral.linear_attention.default, (*inputs, mask_of(1, 9), causal, *given))

    def attention(q, k, v, M):
        return linear_attention(q, k, v, fold_features(w, M, 5, orthogonal=True), causal=causal)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_same(compiled(q, k, v, M), attention(q, k, v, M), (q, k, v, M), 1e-13)


@pytest.mark.parametrize("masked", [False, True])
def test_plain_operators_compute_the_same(masked):
    (q, k, v, M), w = problem(h=4, H=2)
    mask = mask_of(2, 21)
    mask[1] = False  # a query that sees no key gets 0
    proposal = sharp_proposal(torch.eye(5, dtype=F64) / 3)
    for features in (
        fold_features(w, M[:2], 5, shift=tokens(2, 5, seed=6), proposal=proposal),
        fold_features(w, M[0], 5, orthogonal=True),
    ):
        operator = torch.ops.mmspectral.linear_attention.default
        arguments = (q.unflatten(1, (2, -1)), k, v, *features, mask if masked else None)
        for ours, plain in zip(
            operator(*arguments, False, None, None), plain_forward(*arguments, False, None, None), strict=True
        ):
            torch.testing.assert_close(plain, ours, rtol=1e-12, atol=1e-12)
        with pytest.raises(NotImplementedError, match="causal"):
            plain_forward(*arguments, True, None, None)


def test_derivatives_that_do_not_exist_are_refused():
    """torch gives custom operators a forward-mode derivative of zero."""
    (q, k, v, M), w = problem()

    def attention(q, M=M):
        return linear_attention(q, k, v, fold_features(w, M, 5, orthogonal=True))

    for function, x in ((attention, q), (lambda M: attention(q, M), M)):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(function, (x.detach(),), (torch.ones_like(x),))
    (grad,) = torch.autograd.grad(attention(q).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), q)


def test_error_falls_with_the_number_of_features():
    """The root mean square error over 20 draws falls as m^(-1/2)."""
    q, k, v = (tokens(1, 1, 32, 8, seed=s, size=0.4) for s in (1, 2, 3))
    exact, errors = softmax_attention(q, k, v), []
    for m in (2**i for i in range(4, 13)):
        draws = [draw_projection(m, 8, seed, dtype=F64) for seed in range(20)]
        outs = torch.cat([linear_attention(q, k, v, fold_features(w, None, 8, orthogonal=True)) for w in draws])
        errors.append((outs - exact).square().mean().sqrt().item())
    slope = torch.tensor(errors).log2().diff()
    assert slope.mean().item() == pytest.approx(-0.5, abs=0.06), errors
    assert (slope < -0.2).all(), errors


@pytest.mark.parametrize("causal", [False, True])
def test_controls(causal):
    (q, k, v, _), w = problem()
    mask = mask_of(2, 21)
    allowed = (mask[:, None, None, :] & torch.ones(21, 21, dtype=torch.bool).tril()) if causal else mask[:, None, None]
    weights = allowed.expand(2, 2, 21, 21).double()
    mean = weights @ v / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(uniform_attention(v, 21, mask, causal), mean)
    zero = fold_features(w, torch.zeros((), dtype=F64), 5)
    torch.testing.assert_close(linear_attention(q, k, v, zero, mask, causal), mean)
    logits = (q @ k.mT / 5**0.5).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(softmax_attention(q, k, v, mask, causal), logits.softmax(-1) @ v)
    random = constant_attention(v, 21, 16, 5, seed=0, mask=mask, causal=causal)
    assert random.shape == v.shape and not torch.allclose(random, mean)
    torch.testing.assert_close(
        constant_attention(torch.ones_like(v), 21, 16, 5, seed=0, causal=causal), torch.ones_like(v), rtol=1e-6, atol=0
    )


def test_position_codes_do_not_depend_on_the_length():
    codes = position_codes(2000, 3, seed=1)
    assert torch.equal(position_codes(1030, 3, seed=1), codes[:1030])
    assert not torch.equal(position_codes(2000, 3, seed=1, layer=1), codes)
    assert codes.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(mask=torch.ones(2, 21)), TypeError, "must be bool"),
        (dict(mask=torch.ones(21, 21, dtype=torch.bool)), ValueError, "hide keys from all queries alike"),
        (dict(v=torch.ones(2, 2, 20, 3)), ValueError, "do not fit"),
        (dict(k=torch.ones(2, 2, 21, 4)), ValueError, "do not fit"),
        (dict(features=fold_features(torch.ones(3, 8, 5), None, 5)), ValueError, "features are for 3 heads"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    (q, k, v, M), w = problem()
    arguments = dict(q=q, k=k, v=v, features=fold_features(w, M, 5)) | change
    with pytest.raises(error, match=message):
        linear_attention(**arguments)

"""The geometry chosen for a layer: what it holds, and that it is worth its cost on data it has not seen."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mmspectral.analysis.approximation import approximation_error
from mmspectral.analysis.dark_calibration import Fit, Geometry, calibrate_geometry, effective_rank, query_key_moments
from mmspectral.ops.random_features import draw_projection, linear_attention, softmax_attention

SHARED_DATA = Path(os.environ.get("MMSPECTRAL_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
MINILM = SHARED_DATA / "minilm_qk" / "qkv_fp16.npz"
QUICK = dict(fit=Fit(steps=3), scales=(0.4, 0.8), strengths=(0, 1))


def tokens(B=3, h=2, N=24, d=8, seed=0):
    """Queries and keys with a mean, a covariance of condition 100 and logits of a few units."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, B, h, N, d, generator=generator)
    stretch = torch.logspace(0, -1, d) * 2
    return q * stretch + 0.7, k * stretch - 0.3, v


def held_out_error(geometry, qkv, m, draws=range(6)):
    q, k, v = qkv
    exact = softmax_attention(q, k, v)

    def attention(draw):
        return linear_attention(q, k, v, geometry.features(draw_projection(m, geometry.M.shape[1], draw)))

    return approximation_error(attention, exact, draws).softmax


def identity(d):
    return Geometry(torch.eye(d)[None])


@pytest.mark.parametrize(
    ("options", "H", "r"), [({}, 2, 8), (dict(rank=3), 2, 3), (dict(shared=True), 1, 8), (dict(fit=None), 2, 8)]
)
def test_the_geometry_is_one_that_the_features_take(options, H, r):
    qkv = tokens()
    geometry = calibrate_geometry(*qkv, 16, **QUICK | options)
    assert geometry.M.shape == (H, r, 8) and geometry.shift.shape == (H, 8)
    assert [t.shape for t in geometry.proposal] == [(H, r, r), (H, r)]
    assert len(geometry.choice) == len(geometry.condition) == len(geometry.effective_rank) == H
    assert geometry.error_before.shape == geometry.error_after.shape == (2,)
    assert held_out_error(geometry, qkv, 16).isfinite().all()
    assert not any(t.requires_grad for t in (geometry.M, geometry.shift, *geometry.proposal))


def test_reducers_are_switches():
    q, k, v = tokens()
    plain = calibrate_geometry(q, k, v, 16, sharp=False, shift=False, **QUICK)
    assert plain.proposal is None and plain.shift is None
    shifted = calibrate_geometry(q, k, v, 16, sharp=False, **QUICK | dict(fit=Fit(steps=3, shift=False)))
    assert shifted.proposal is None
    torch.testing.assert_close(shifted.shift, q.mean((0, 2)) + k.mean((0, 2)))


def test_the_family_flattens_the_covariance():
    """With a large, s (I + a Lambda)^(-1/2) is whitening up to a scalar, and with a = 0 a scalar."""
    q, k, v = tokens()
    scalar = calibrate_geometry(q, k, v, 16, fit=None, scales=(0.5,), strengths=(0,))
    assert scalar.choice == ("s = 0.5, a = 0",) * 2
    torch.testing.assert_close(scalar.M, 0.5 * torch.eye(8).repeat(2, 1, 1))
    M = calibrate_geometry(q, k, v, 16, fit=None, scales=(1,), strengths=(1e6,)).M.double()
    whitened = M @ query_key_moments(q, k).covariance @ M.mT
    torch.testing.assert_close(whitened, whitened[:, :1, :1] * torch.eye(8), rtol=1e-3, atol=1e-9)


def test_fitting_lowers_the_error_on_unseen_tokens():
    """Half of the directions matter to no query, which a covariance of queries and keys together cannot tell."""
    matter = torch.arange(8) < 4

    def lopsided(B, seed):
        q, k, v = torch.randn(3, B, 2, 64, 8, generator=torch.Generator().manual_seed(seed))
        return q * torch.where(matter, 1, 0.05), k * torch.where(matter, 1, 2**0.5), v

    sample, unseen, m = lopsided(4, 0), lopsided(2, 5), 32
    family = calibrate_geometry(*sample, m, fit=None)
    fitted = calibrate_geometry(*sample, m, fit=Fit(steps=150, lr=0.03))
    assert fitted.choice == ("fitted", "fitted")
    before, without, after = (held_out_error(g, unseen, m, range(20)) for g in (identity(8), family, fitted))
    assert without.mean() < 0.7 * before.mean() and after.mean() < 0.95 * without.mean()
    torch.testing.assert_close(fitted.error_before, before, rtol=0.3, atol=0)
    torch.testing.assert_close(fitted.error_after, after, rtol=0.3, atol=0)


def test_a_fit_that_is_worse_is_not_taken():
    qkv = tokens()
    wild = calibrate_geometry(*qkv, 16, **QUICK | dict(fit=Fit(steps=2, lr=50.0)))
    plain = calibrate_geometry(*qkv, 16, **QUICK | dict(fit=None))
    assert wild.choice == plain.choice
    torch.testing.assert_close(wild.M, plain.M)
    torch.testing.assert_close(wild.shift, plain.shift)


def test_the_result_follows_the_units_of_the_data():
    q, k, v = tokens()
    one = calibrate_geometry(q, k, v, 16, scale=0.4, **QUICK)
    other = calibrate_geometry(8 * q, 8 * k, v, 16, scale=0.4 / 64, **QUICK)
    torch.testing.assert_close(other.M, one.M, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(other.shift / 8, one.shift, rtol=1e-3, atol=1e-4)


def test_one_sequence_half_precision_and_no_values():
    q, k, v = (t[:1] for t in tokens())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    geometry = calibrate_geometry(q.bfloat16(), k.bfloat16(), None, 16, **QUICK)
    assert torch.equal(torch.get_rng_state(), state), "the global generator must be left alone"
    assert geometry.M.dtype == geometry.shift.dtype == torch.float32
    again = calibrate_geometry(q.bfloat16(), k.bfloat16(), None, 16, **QUICK)
    torch.testing.assert_close(again.M, geometry.M, rtol=0, atol=0)
    other = calibrate_geometry(q.bfloat16(), k.bfloat16(), v, 16, **QUICK)
    assert not torch.equal(other.error_after, geometry.error_after)


def test_errors_are_of_tokens_that_fitting_has_not_seen():
    options = dict(fit=Fit(steps=30), scales=(0.3,), strengths=(0,))
    q, k, v = tokens(B=4, N=48)
    one = calibrate_geometry(q, k, v, 16, **options)
    seen = calibrate_geometry(q, k, torch.cat([-v[:2], v[2:]]), 16, **options)
    unseen = calibrate_geometry(q, k, torch.cat([v[:3], v[3:].roll(1, 2)]), 16, **options)
    assert one.choice == seen.choice == unseen.choice == ("fitted", "fitted")
    torch.testing.assert_close(seen.error_before, one.error_before)
    assert not torch.equal(unseen.error_before, one.error_before) and torch.equal(unseen.M, one.M)


def test_too_few_tokens_have_no_condition_and_what_is_not_finite_is_refused():
    assert calibrate_geometry(*tokens(B=1, N=3), 16, **QUICK | dict(fit=None)).condition.min() > 1e12
    q, k, v = tokens()
    k[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        calibrate_geometry(q, k, v, 16, **QUICK)


def test_moments_and_effective_rank():
    q, k, _ = tokens(N=10)
    moments = query_key_moments(q, k)
    head = k[:, 1].reshape(-1, 8).double()
    torch.testing.assert_close(moments.key_covariance[1], torch.cov(head.t(), correction=0))
    torch.testing.assert_close(moments.shift[1], head.mean(0) + q[:, 1].reshape(-1, 8).double().mean(0))
    together = query_key_moments(q, k, shared=True)
    torch.testing.assert_close(together.query_covariance[0], torch.cov(q.double().reshape(-1, 8).t(), correction=0))
    torch.testing.assert_close(effective_rank(torch.diag(torch.tensor([2.0, 2, 2, 0]))), torch.tensor(3.0))


@pytest.mark.skipif(not MINILM.is_file(), reason=f"no real queries and keys at {MINILM}; set MMSPECTRAL_SHARED_DATA")
@pytest.mark.parametrize(
    ("layers", "m", "fit", "bound"),
    [
        ([4], 32, Fit(steps=100), 0.65),
        pytest.param(range(6), 32, Fit(), 0.65, marks=pytest.mark.slow),
        pytest.param(range(6), 512, Fit(), 0.60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_real_queries_and_keys(layers, m, fit, bound):
    """On sequences that calibration has not seen, against Performer and against the temperature control."""
    ratios, chosen, control = [], [], []
    with np.load(MINILM) as arrays:
        for i in layers:
            q, k, v = (torch.from_numpy(arrays[f"{name}{i}"]).float() for name in "qkv")
            sample, unseen = ([t[part] for t in (q, k, v)] for part in (slice(3), slice(3, None)))
            chosen.append(held_out_error(calibrate_geometry(*sample, m, fit=fit), unseen, m))
            control.append(held_out_error(calibrate_geometry(*sample, m, fit=None, strengths=(0,)), unseen, m))
            ratios.append(chosen[-1] / held_out_error(identity(32), unseen, m))
    assert torch.cat(ratios).median() <= bound
    assert torch.cat(chosen).median() < torch.cat(control).median()

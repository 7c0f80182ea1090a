"""Errors and bias are those they are said to be, and error falls with the number of features as it must."""

import torch

from mmspectral.analysis.approximation import approximation_error, kernel_attention
from mmspectral.ops.random_features import (
    draw_projection,
    fold_features,
    kernel_logits,
    softmax_attention,
    uniform_attention,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(energy, d=16, N=48):
    """q, k, v [1, 2, N, d] with E|q|^2 = E|k|^2 = ``energy``, the scale of the logits included."""
    q, k, v = normal(3, 1, 2, N, d)
    return q * (energy / d**0.5) ** 0.5, k * (energy / d**0.5) ** 0.5, v


def test_error_and_bias_of_a_known_estimator():
    exact, bias = normal(2, 3, 50, 40), 0.2 * normal(2, 3, 50, 40, seed=1)
    noise = torch.tensor([0.1, 0.5, 0.0]).view(1, 3, 1, 1)

    error = approximation_error(
        lambda draw: exact + bias + noise * normal(2, 3, 50, 40, seed=9 + draw), exact, range(8)
    )
    torch.testing.assert_close(error.bias, torch.full((3,), 0.2, dtype=torch.float64), rtol=0.04, atol=0)
    expected = (0.2**2 + noise.double().square().flatten()).sqrt()
    torch.testing.assert_close(error.softmax, expected, rtol=0.04, atol=0)
    assert error.own is None


def test_bias_of_a_constant_is_its_error_and_unknown_from_one_draw():
    q, k, v = tokens(4)
    exact = softmax_attention(q, k, v)
    error = approximation_error(lambda draw: uniform_attention(v, q.shape[2]), exact, range(3))
    torch.testing.assert_close(error.bias, error.softmax)
    naive = (v.mean(2, keepdim=True) - exact).square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))
    torch.testing.assert_close(error.softmax, naive.sqrt())
    assert approximation_error(lambda draw: exact + draw, exact, [1]).bias.isnan().all()


def test_the_own_kernel_is_what_features_tend_to():
    q, k, v = tokens(1)
    M = torch.stack([torch.eye(16, dtype=torch.float64)[:8] * 1.3, normal(8, 16, seed=3) / 4])
    shift = normal(2, 16, seed=4) / 4
    own = kernel_attention(q, k, v, M)
    features = fold_features(draw_projection(40_000, 8, seed=0, dtype=torch.float64), M, 16, shift=shift)
    estimate = kernel_logits(q, k, features).softmax(-1) @ v
    assert (estimate - own).norm() < 0.03 * own.norm() < 0.3 * (own - softmax_attention(q, k, v)).norm()

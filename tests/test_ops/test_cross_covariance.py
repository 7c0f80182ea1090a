import pytest
import torch

from mmspectral import ops
from mmspectral.ops.conditioning import reference


def inputs(B=2, h=3, d=5, N=63, dtype=torch.float64, size=1.0):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (size * torch.randn(B, h, d, N, dtype=torch.float64, generator=generator) for _ in range(3))
    temperature = 1 + 0.1 * torch.randn(h, 1, 1, dtype=torch.float64, generator=generator)
    return [t.to(dtype) for t in (q, k, v, temperature)]


def test_matches_reference_in_values_and_gradients():
    leaves = [t.requires_grad_() for t in inputs()]
    ours, naive = ops.cross_covariance_attention(*leaves), reference.cross_covariance_attention(*leaves)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(naive)
    for a, b in zip(torch.autograd.grad(ours, leaves, probe), torch.autograd.grad(naive, leaves, probe), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 3e3])
def test_half_precision_error_is_at_most_twice_plain_torch(dtype, size):
    """At 3e3 the sums of squares of plain float16 overflow; ours stays finite."""
    q, k, v, temperature = inputs(dtype=dtype, size=size)
    exact = reference.cross_covariance_attention(q, k, v, temperature)
    ours = ops.cross_covariance_attention(q, k, v, temperature)
    assert ours.dtype == dtype
    assert ours.isfinite().all()
    attn = (torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT) * temperature
    plain = attn.softmax(-1) @ v
    assert (ours - exact).norm() <= 2 * (plain - exact).norm() or not plain.isfinite().all()
    assert (ours - exact).norm() < 0.02 * exact.norm()


def test_zero_input_has_finite_gradients():
    leaves = [torch.zeros(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    ops.cross_covariance_attention(*leaves, torch.ones(2, 1, 1)).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_dead_channel_has_finite_gradients_in_float16():
    """The derivative of a division by 1e-12 is no float16 number."""
    q, k, v, temperature = inputs(dtype=torch.float16)
    q[:, :, 0] = 0
    leaves = [t.requires_grad_() for t in (q, k, v)]
    ops.cross_covariance_attention(*leaves, temperature).float().square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)

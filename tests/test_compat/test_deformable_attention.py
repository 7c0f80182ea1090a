"""Multi-scale deformable attention against loops over queries and points in float64, and autograd of them."""

import math

import mmcv.ops
import pytest
import torch
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

from mmspectral.compat import mmcv_ops_backend, torchvision_ops
from tests.helpers import assert_rounded_once

SHAPES = [(4, 6), (3, 2), (1, 1)]
B, QUERIES, HEADS, D, POINTS = 2, 3, 2, 4, 2


def sample(plane, y, x):
    """Bilinear interpolation of [H, W, d] between pixel centres, 0 outside."""
    height, width = plane.shape[:2]
    y, x = y * height - 0.5, x * width - 0.5
    top, left = math.floor(y.item()), math.floor(x.item())
    value = plane.new_zeros(plane.shape[2])
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < height and 0 <= column < width:
                value = value + (1 - (y - row).abs()) * (1 - (x - column).abs()) * plane[row, column]
    return value


def reference_attention(value, locations, weights):
    levels = value.split([h * w for h, w in SHAPES], dim=1)
    result = []
    for b in range(B):
        for query in range(QUERIES):
            for head in range(HEADS):
                total = value.new_zeros(D)
                for level, (h, w) in enumerate(SHAPES):
                    plane = levels[level][b, :, head].view(h, w, D)
                    for point in range(POINTS):
                        x, y = locations[b, query, head, level, point]
                        total = total + weights[b, query, head, level, point] * sample(plane, y, x)
                result.append(total)
    return torch.stack(result).view(B, QUERIES, HEADS * D)


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(B, sum(h * w for h, w in SHAPES), HEADS, D, generator=generator)
    locations = 1.4 * torch.rand(B, QUERIES, HEADS, len(SHAPES), POINTS, 2, generator=generator) - 0.2
    weights = torch.rand(B, QUERIES, HEADS, len(SHAPES), POINTS, generator=generator)
    grad_output = torch.randn(B, QUERIES, HEADS * D, generator=generator)
    return [t.to(dtype) for t in (value, locations, weights, grad_output)]


def expected(value, locations, weights, grad_output):
    leaves = [t.detach().double().requires_grad_() for t in (value, locations, weights)]
    output = reference_attention(*leaves)
    output.backward(grad_output.double())
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def run(operators, value, locations, weights, grad_output, device="cpu"):
    value, locations, weights, grad_output = (t.to(device) for t in (value, locations, weights, grad_output))
    shapes = torch.tensor(SHAPES, device=device)
    starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
    output = operators.ms_deform_attn_forward(value, shapes, starts, locations, weights, im2col_step=64)
    grads = [torch.zeros_like(t) for t in (value, locations, weights)]
    operators.ms_deform_attn_backward(value, shapes, starts, locations, weights, grad_output, *grads, im2col_step=64)
    return [output, *grads]


def assert_close(results, wanted):
    for actual, exact in zip(results, wanted, strict=True):
        torch.testing.assert_close(actual.double().cpu(), exact, rtol=1e-4, atol=1e-4)


def test_values_and_gradients(device):
    tensors = problem()
    assert_close(run(torchvision_ops, *tensors, device), expected(*tensors))


@pytest.mark.gpu
@pytest.mark.skipif(mmcv_ops_backend() != "compiled", reason="this mmcv has no compiled operators")
def test_compiled_operator_answers_to_the_same_reference():
    import mmcv._ext

    tensors = problem()
    assert_close(run(mmcv._ext, *tensors, "cuda"), expected(*tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(device, dtype):
    tensors = problem(dtype)
    for actual, wanted in zip(run(torchvision_ops, *tensors, device), expected(*tensors), strict=True):
        assert actual.dtype == dtype
        assert_rounded_once(actual, wanted, slack=1e-4)


def test_through_the_function_that_mmcv_uses_on_cuda():
    """On the CPU mmcv takes its PyTorch code; on CUDA this function, whatever serves ``mmcv._ext``."""
    if mmcv_ops_backend() == "compiled" and not torch.cuda.is_available():
        pytest.skip("the compiled operator runs on CUDA only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    value, locations, weights, grad_output = problem()
    leaves = [t.to(device).detach().requires_grad_() for t in (value, locations, weights)]
    shapes = torch.tensor(SHAPES, device=device)
    starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
    output = MultiScaleDeformableAttnFunction.apply(leaves[0], shapes, starts, *leaves[1:], 64)
    output.backward(grad_output.to(device))
    results = [output.detach(), *(leaf.grad for leaf in leaves)]
    assert_close(results, expected(value, locations, weights, grad_output))


def test_the_layer_of_mmcv_runs(device):
    torch.manual_seed(0)
    layer = mmcv.ops.MultiScaleDeformableAttention(8, HEADS, len(SHAPES), POINTS, batch_first=True).to(device)
    tokens = sum(h * w for h, w in SHAPES)
    y = layer(
        torch.randn(B, QUERIES, 8, device=device),
        value=torch.randn(B, tokens, 8, device=device),
        reference_points=torch.rand(B, QUERIES, len(SHAPES), 2, device=device),
        spatial_shapes=torch.tensor(SHAPES, device=device),
        level_start_index=torch.tensor([0, 24, 30], device=device),
    )
    y.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())

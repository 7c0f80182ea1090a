"""RoIPool against loops over bins and pixels in float64, and its gradient against autograd of these loops."""

import math

import mmcv.ops
import pytest
import torch

from mmspectral.compat import mmcv_ops_backend, torchvision_ops

SIZE = (3, 2)
# Index into the batch, x1, y1, x2, y2 in the image: inside, partly and wholly outside, narrower than a pixel, reversed.
ROIS = torch.tensor(
    [
        [1, 3.0, 2.5, 17.0, 13.0],
        [0, -9.0, -6.0, 8.0, 7.0],
        [2, 10.0, 9.0, 90.0, 71.0],
        [1, 200.0, 200.0, 220.0, 210.0],
        [0, 5.25, 5.5, 5.75, 6.0],
        [2, 8.0, 8.0, 4.0, 12.0],
    ]
)


def reference_roi_pool(features, rois, size, scale):
    H, W = features.shape[2:]
    result = []
    for index, x1, y1, x2, y2 in rois.double().tolist():
        left, top, width, height = x1 * scale, y1 * scale, (x2 + 1 - x1) * scale, (y2 + 1 - y1) * scale
        for plane in features[int(index)]:
            for i in range(size[0]):
                for j in range(size[1]):
                    ys = range(math.floor(top + i * height / size[0]), math.ceil(top + (i + 1) * height / size[0]))
                    xs = range(math.floor(left + j * width / size[1]), math.ceil(left + (j + 1) * width / size[1]))
                    pixels = [plane[y, x] for y in ys for x in xs if 0 <= y < H and 0 <= x < W]
                    there = pixels and width > 0 and height > 0
                    result.append(torch.stack(pixels).max() if there else plane.new_zeros(()))
    return torch.stack(result).reshape(len(rois), features.shape[1], *size)


@pytest.fixture
def features():
    """Planes without equal values, which are exact in half precision."""
    generator = torch.Generator().manual_seed(0)
    planes = [torch.randperm(11 * 13, generator=generator).float() - 71 for _ in range(6)]
    return torch.stack(planes).view(3, 2, 11, 13)


def forward(operators, features, rois, scale):
    output = features.new_full((len(rois), features.shape[1], *SIZE), 7.0)
    argmax = torch.full(output.shape, 7, dtype=torch.int, device=features.device)
    operators.roi_pool_forward(
        features, rois, output, argmax, pooled_height=SIZE[0], pooled_width=SIZE[1], spatial_scale=scale
    )
    return output, argmax


def backward(operators, grad_output, rois, argmax, grad_input, scale):
    operators.roi_pool_backward(
        grad_output, rois, argmax, grad_input, pooled_height=SIZE[0], pooled_width=SIZE[1], spatial_scale=scale
    )
    return grad_input


@pytest.mark.parametrize("scale", [0.25, 0.3, 1.0])
def test_values_and_gradient(device, features, scale):
    exact = features.double().requires_grad_()
    expected = reference_roi_pool(exact, ROIS, SIZE, scale)
    grad_output = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(grad_output.double())

    rois = ROIS.to(device)
    pooled, argmax = forward(torchvision_ops, features.to(device), rois, scale)
    torch.testing.assert_close(pooled.double().cpu(), expected.detach(), rtol=0, atol=0)
    assert (argmax[3] == -1).all() and (argmax[5] == -1).all() and (argmax[0] >= 0).all()
    grad = torch.zeros(features.shape, device=device)
    backward(torchvision_ops, grad_output.to(device), rois, argmax, grad, scale)
    torch.testing.assert_close(grad.double().cpu(), exact.grad, rtol=1e-6, atol=1e-6)
    added = torch.full(features.shape, 2.0, device=device)
    backward(torchvision_ops, grad_output.to(device), rois, argmax, added, scale)
    torch.testing.assert_close(added, grad + 2)


@pytest.mark.gpu
@pytest.mark.skipif(mmcv_ops_backend() != "compiled", reason="this mmcv has no compiled operators")
def test_compiled_operator_answers_to_the_same_reference(features):
    import mmcv._ext

    pooled, _ = forward(mmcv._ext, features.cuda(), ROIS.cuda(), 0.25)
    # The compiled operator writes nothing for a reversed box.
    torch.testing.assert_close(pooled[:5].double().cpu(), reference_roi_pool(features.double(), ROIS[:5], SIZE, 0.25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, features, dtype):
    features, rois = features.to(dtype), ROIS.to(dtype)
    exact = features.double().requires_grad_()
    expected = reference_roi_pool(exact, rois, SIZE, 0.25)
    expected.sum().backward()
    pooled, argmax = forward(torchvision_ops, features.to(device), rois.to(device), 0.25)
    assert pooled.dtype == dtype and torch.equal(pooled.double().cpu(), expected.detach())
    grad = backward(
        torchvision_ops,
        torch.ones_like(pooled),
        rois.to(device),
        argmax,
        torch.zeros(features.shape, dtype=dtype, device=device),
        0.25,
    )
    assert grad.dtype == dtype and torch.equal(grad.double().cpu(), exact.grad)


def test_no_rois(device, features):
    pooled, argmax = forward(torchvision_ops, features.to(device), ROIS[:0].to(device), 0.25)
    assert pooled.shape == (0, 2, *SIZE)
    grad = torch.zeros(features.shape, device=device)
    assert not backward(torchvision_ops, pooled, ROIS[:0].to(device), argmax, grad, 0.25).any()


def test_through_mmcv(device, features):
    if device == "cpu" and mmcv_ops_backend() == "compiled":
        pytest.skip("mmcv compiles this operator for devices only")
    features = features.to(device).requires_grad_()
    layer = mmcv.ops.RoIPool(SIZE, spatial_scale=0.25)
    rois = ROIS[:5].to(device)
    layer(features, rois).transpose(2, 3).square().sum().backward()
    exact = features.detach().double().cpu().requires_grad_()
    reference_roi_pool(exact, ROIS[:5], SIZE, 0.25).square().sum().backward()
    torch.testing.assert_close(features.grad.double().cpu(), exact.grad, rtol=1e-5, atol=1e-5)

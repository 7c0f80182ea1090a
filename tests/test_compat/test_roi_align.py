"""Average RoIAlign against loops over bins and samples in float64, and its gradient against autograd of these loops."""

import math

import mmcv.ops
import pytest
import torch

from mmspectral.compat import torchvision_ops
from tests.helpers import assert_rounded_once

SIZE = (3, 2)
# Index into the batch, x1, y1, x2, y2 in the image: inside, partly and wholly outside, narrower than a pixel, empty.
ROIS = torch.tensor(
    [
        [1, 3.0, 2.5, 17.0, 13.0],
        [0, -9.0, -6.0, 8.0, 7.0],
        [2, 10.0, 9.0, 90.0, 71.0],
        [1, 200.0, 200.0, 220.0, 210.0],
        [0, 5.25, 5.5, 5.75, 6.0],
        [2, 8.0, 8.0, 8.0, 8.0],
    ]
)


def sample(plane, y, x):
    """Bilinear interpolation that is 0 beyond one pixel from the border and constant within it."""
    height, width = plane.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return plane.new_zeros(())
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = math.floor(y), math.floor(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = plane[top, left] * (1 - (x - left)) + plane[top, right] * (x - left)
    lower = plane[bottom, left] * (1 - (x - left)) + plane[bottom, right] * (x - left)
    return upper * (1 - (y - top)) + lower * (y - top)


def reference_roi_align(features, rois, size, scale, sampling_ratio, aligned):
    height, width = size
    result = []
    for index, *corners in rois.double().tolist():
        x1, y1, x2, y2 = (c * scale - (0.5 if aligned else 0.0) for c in corners)
        roi_height, roi_width = (y2 - y1, x2 - x1) if aligned else (max(y2 - y1, 1.0), max(x2 - x1, 1.0))
        rows = sampling_ratio or math.ceil(roi_height / height)
        columns = sampling_ratio or math.ceil(roi_width / width)
        for plane in features[int(index)]:
            for i in range(height):
                for j in range(width):
                    ys = [y1 + (i + (r + 0.5) / rows) * roi_height / height for r in range(rows)]
                    xs = [x1 + (j + (c + 0.5) / columns) * roi_width / width for c in range(columns)]
                    values = [sample(plane, y, x) for y in ys for x in xs]
                    result.append(torch.stack(values).mean() if values else plane.new_zeros(()))
    return torch.stack(result).reshape(len(rois), features.shape[1], height, width)


def keywords(scale=0.25, sampling_ratio=0, pool_mode=1, aligned=True):
    return dict(
        aligned_height=SIZE[0],
        aligned_width=SIZE[1],
        spatial_scale=scale,
        sampling_ratio=sampling_ratio,
        pool_mode=pool_mode,
        aligned=aligned,
    )


def forward(operators, features, rois, **options):
    output, unused = features.new_full((len(rois), features.shape[1], *SIZE), 7.0), features.new_zeros(0)
    operators.roi_align_forward(features, rois, output, unused, unused, **keywords(**options))
    return output


def backward(operators, grad_output, rois, grad_input, **options):
    unused = grad_output.new_zeros(0)
    operators.roi_align_backward(grad_output, rois, unused, unused, grad_input, **keywords(**options))
    return grad_input


@pytest.fixture
def features():
    return torch.randn(3, 2, 11, 13, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sampling_ratio", [0, 2])
@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_values_and_gradient(operators, device, features, scale, sampling_ratio, aligned):
    options = dict(scale=scale, sampling_ratio=sampling_ratio, aligned=aligned)
    exact = features.double().requires_grad_()
    expected = reference_roi_align(exact, ROIS, SIZE, scale, sampling_ratio, aligned)
    grad_output = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(grad_output.double())

    rois, grad_output = ROIS.to(device), grad_output.to(device)
    pooled = forward(operators, features.to(device), rois, **options)
    torch.testing.assert_close(pooled.double().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    grad_input = backward(operators, grad_output, rois, features.new_zeros(features.shape, device=device), **options)
    torch.testing.assert_close(grad_input.double().cpu(), exact.grad, rtol=1e-5, atol=1e-5)
    assert exact.grad.abs().sum() > 0


def test_float64_keeps_its_precision(device, features):
    expected = reference_roi_align(features.double(), ROIS, SIZE, 0.25, 2, True)
    pooled = forward(torchvision_ops, features.double().to(device), ROIS.to(device), sampling_ratio=2)
    torch.testing.assert_close(pooled.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(device, features, dtype):
    features, rois = features.to(dtype), ROIS.to(dtype)  # ROIS is exact in either type
    exact = features.double().requires_grad_()
    expected = reference_roi_align(exact, ROIS, SIZE, 0.25, 0, True)
    grad_output = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected.backward(grad_output.double())

    pooled = forward(torchvision_ops, features.to(device), rois.to(device))
    grad_input = torch.zeros(features.shape, dtype=dtype, device=device)
    backward(torchvision_ops, grad_output.to(device), rois.to(device), grad_input)
    for actual, wanted in ((pooled, expected.detach()), (grad_input, exact.grad)):
        assert actual.dtype == dtype
        assert_rounded_once(actual, wanted, slack=1e-5)


def test_gradient_is_added(device, features):
    grad_output = torch.ones(len(ROIS), 2, *SIZE, device=device)
    alone = backward(torchvision_ops, grad_output, ROIS.to(device), torch.zeros(features.shape, device=device))
    added = backward(torchvision_ops, grad_output, ROIS.to(device), torch.full(features.shape, 2.0, device=device))
    torch.testing.assert_close(added, alone + 2)


def test_no_rois(operators, device, features):
    none = ROIS[:0].to(device)
    assert forward(operators, features.to(device), none).shape == (0, 2, *SIZE)
    grad_input = torch.zeros(features.shape, device=device)
    assert not backward(operators, torch.zeros(0, 2, *SIZE, device=device), none, grad_input).any()


def test_maximum_is_refused_clearly(features):
    with pytest.raises(RuntimeError, match="pool_mode='max'.*use 'avg'"):
        forward(torchvision_ops, features, ROIS, pool_mode=0)
    with pytest.raises(RuntimeError, match="pool_mode='max'.*use 'avg'"):
        backward(torchvision_ops, torch.ones(len(ROIS), 2, *SIZE), ROIS, features, pool_mode=0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_through_mmcv(device, features, deterministic):
    """mmcv's module, as mmdet's RoI extractor calls it; a non-contiguous gradient reaches the operator."""
    features = features.to(device).requires_grad_()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        layer = mmcv.ops.RoIAlign(SIZE, spatial_scale=0.25, sampling_ratio=0)
        layer(features, ROIS.to(device)).transpose(2, 3).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    exact = features.detach().double().cpu().requires_grad_()
    reference_roi_align(exact, ROIS, SIZE, 0.25, 0, True).square().sum().backward()
    torch.testing.assert_close(features.grad.double().cpu(), exact.grad, rtol=1e-4, atol=1e-5)

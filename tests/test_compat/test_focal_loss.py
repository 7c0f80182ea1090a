"""Sigmoid focal loss against a loop over logits in float64, and its gradient against autograd of that loop."""

import mmcv.ops
import pytest
import torch

from mmspectral.compat import torchvision_ops
from tests.helpers import assert_rounded_once


def reference_focal_loss(logits, target, weight, gamma, alpha):
    rows = []
    for row, label in zip(logits, target.tolist(), strict=True):
        known = 0 <= label < len(row)
        factor = weight[label].double() if len(weight) and known else 1.0
        for c, x in enumerate(row):
            p, not_p = 1 / (1 + torch.exp(-x)), 1 / (1 + torch.exp(x))
            if c == label:
                loss = alpha * not_p**gamma * torch.log1p(torch.exp(-x))  # -log p
            else:
                loss = (1 - alpha) * p**gamma * torch.log1p(torch.exp(x))  # -log(1 - p)
            rows.append(loss * factor)
    return torch.stack(rows).reshape(logits.shape) if rows else logits


@pytest.fixture
def logits():
    return torch.randn(9, 5, generator=torch.Generator().manual_seed(0)) * 3


TARGET = torch.tensor([0, 4, 2, 5, 1, 5, 3, 0, 2])  # 5 is background
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.5, 3.0])


def run(operators, name, logits, target, weight, gamma, alpha):
    output = torch.full_like(logits, 7.0)
    getattr(operators, name)(logits, target, weight, output, gamma=gamma, alpha=alpha)
    return output


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("alpha", [0.25, 0.9])
def test_values_and_gradient(operators, device, logits, alpha, gamma, weighted):
    if device == "cpu" and operators is not torchvision_ops:
        pytest.skip("mmcv compiles this operator for devices only")
    # The compiled operator reads beyond the weights of a background row.
    target = TARGET.clamp(max=4) if weighted else TARGET
    weight = WEIGHT if weighted else WEIGHT[:0]
    exact = logits.double().requires_grad_()
    expected = reference_focal_loss(exact, target, weight, gamma, alpha)
    expected.sum().backward()
    given = (logits.to(device), target.to(device), weight.to(device), gamma, alpha)
    loss = run(operators, "sigmoid_focal_loss_forward", *given)
    torch.testing.assert_close(loss.double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    gradient = run(operators, "sigmoid_focal_loss_backward", *given)
    torch.testing.assert_close(gradient.double().cpu(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", [5, -1, 255, -100])
def test_background_has_weight_one(logits, label):
    target = torch.where(TARGET == 5, label, TARGET)
    loss = run(torchvision_ops, "sigmoid_focal_loss_forward", logits, target, WEIGHT, 2.0, 0.25)
    expected = reference_focal_loss(logits.double(), target, WEIGHT, 2.0, 0.25)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_confident_logits_keep_value_and_gradient(gamma):
    """In float32, 1 - p is 0 for these where p is near 1, and its powers below 1 have no derivative there."""
    logits = torch.tensor([[20.0, -25.0], [-20.0, 25.0], [30.0, -30.0]])
    target = torch.tensor([0, 0, 1])
    exact = logits.double().requires_grad_()
    expected = reference_focal_loss(exact, target, WEIGHT[:0], gamma, 0.25)
    expected.sum().backward()
    given = (logits, target, WEIGHT[:0], gamma, 0.25)
    loss = run(torchvision_ops, "sigmoid_focal_loss_forward", *given)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
    gradient = run(torchvision_ops, "sigmoid_focal_loss_backward", *given)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(device, logits, dtype):
    logits, weight = logits.to(dtype), WEIGHT.to(dtype)  # WEIGHT is exact in either type
    exact = logits.double().requires_grad_()
    expected = reference_focal_loss(exact, TARGET, WEIGHT, 2.0, 0.25)
    expected.sum().backward()
    given = (logits.to(device), TARGET.to(device), weight.to(device), 2.0, 0.25)
    for name, wanted in (("forward", expected.detach()), ("backward", exact.grad)):
        actual = run(torchvision_ops, f"sigmoid_focal_loss_{name}", *given)
        assert actual.dtype == dtype
        assert_rounded_once(actual, wanted)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_through_mmcv(device, logits, reduction):
    if device == "cpu" and mmcv.ops.focal_loss.ext_module.sigmoid_focal_loss_forward is not (
        torchvision_ops.sigmoid_focal_loss_forward
    ):
        pytest.skip("mmcv compiles this operator for devices only")
    given = logits.to(device, copy=True).requires_grad_()
    loss = mmcv.ops.sigmoid_focal_loss(given, TARGET.to(device), 2.0, 0.25, None, reduction)
    loss.sum().backward()
    exact = logits.double().requires_grad_()
    expected = reference_focal_loss(exact, TARGET, WEIGHT[:0], 2.0, 0.25)
    if reduction != "none":
        expected = expected.sum() / (len(logits) if reduction == "mean" else 1)
    expected.sum().backward()
    torch.testing.assert_close(loss.detach().double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given.grad.double().cpu(), exact.grad, rtol=1e-5, atol=1e-6)


def test_no_rows(device):
    logits, target = torch.zeros(0, 5, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    for name in ("forward", "backward"):
        for weight in (WEIGHT, WEIGHT[:0]):
            given = (logits, target, weight.to(device), 2.0, 0.25)
            assert run(torchvision_ops, f"sigmoid_focal_loss_{name}", *given).shape == (0, 5)

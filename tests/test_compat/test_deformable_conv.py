"""Deformable convolution v1 and v2 against a dense sum over all pixels in float64, and autograd of it."""

import mmcv.ops
import pytest
import torch

from mmspectral.compat import torchvision_ops

# stride, padding, dilation (each vertical, horizontal), groups, offset groups
GEOMETRIES = [((1, 1), (1, 1), (1, 1), 1, 1), ((2, 1), (0, 2), (1, 2), 2, 2), ((1, 2), (2, 0), (2, 1), 1, 2)]
EVERY = pytest.mark.parametrize(("stride", "padding", "dilation", "groups", "offset_groups"), GEOMETRIES)
CHANNELS, OUT, KERNEL, SIZE = 4, 6, (3, 2), (6, 7)


def tent(place, size):
    """Weights of linear interpolation at ``place`` over the pixels 0 to size - 1, [..., size]."""
    return (1 - (place[..., None] - torch.arange(size).double()).abs()).clamp(min=0)


def reference_deform_conv(input, weight, offset, mask, bias, stride, padding, dilation, groups, offset_groups):
    """Every sampling point takes a sum over all pixels of the image, weighted by two tents."""
    B, C, H, W = input.shape
    out_h, out_w = offset.shape[2:]
    (out, _, h, w), G, g = weight.shape, offset_groups, groups
    offset = offset.view(B, G, h, w, 2, out_h, out_w)
    i, j = torch.arange(h).double().view(h, 1, 1, 1), torch.arange(w).double().view(1, w, 1, 1)
    y, x = torch.arange(out_h).double().view(1, 1, out_h, 1), torch.arange(out_w).double().view(1, 1, 1, out_w)
    rows = tent(y * stride[0] - padding[0] + i * dilation[0] + offset[:, :, :, :, 0], H)  # [B, G, h, w, H', W', H]
    columns = tent(x * stride[1] - padding[1] + j * dilation[1] + offset[:, :, :, :, 1], W)
    sampled = torch.einsum("bGijyxr,bGcrs,bGijyxs->bGcijyx", rows, input.view(B, G, C // G, H, W), columns)
    if mask is not None:
        sampled = sampled * mask.view(B, G, 1, h, w, out_h, out_w)
    sampled = sampled.reshape(B, g, C // g, h, w, out_h, out_w)
    result = torch.einsum("bgcijyx,gocij->bgoyx", sampled, weight.view(g, out // g, C // g, h, w))
    result = result.reshape(B, out, out_h, out_w)
    return result if bias is None else result + bias.view(1, out, 1, 1)


def problem(stride, padding, dilation, groups, offset_groups, modulated, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    out = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(SIZE, padding, dilation, KERNEL, stride, strict=True)
    ]
    points = offset_groups * KERNEL[0] * KERNEL[1]
    # Away from whole pixels, where the gradient with respect to the offset jumps.
    offset = (
        (2 * draw(2, 2 * points, *out)).float().floor()
        + 0.25
        + torch.rand(2, 2 * points, *out, generator=generator) / 2
    )
    tensors = dict(
        input=draw(2, CHANNELS, *SIZE),
        weight=draw(OUT, CHANNELS // groups, *KERNEL),
        offset=offset.to(dtype),
        mask=draw(2, points, *out).sigmoid() if modulated else None,
        bias=draw(OUT) if modulated else None,
    )
    return tensors, draw(2, OUT, *out)


def options(stride, padding, dilation, groups, offset_groups):
    names = dict(zip(("dH", "dW"), stride, strict=True), kH=KERNEL[0], kW=KERNEL[1])
    names.update(zip(("padH", "padW", "dilationH", "dilationW"), (*padding, *dilation), strict=True))
    return dict(names, group=groups, deformable_group=offset_groups, im2col_step=2)


def modulated_options(stride, padding, dilation, groups, offset_groups, with_bias=True):
    names = ("kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w")
    values = (*KERNEL, *stride, *padding, *dilation)
    return dict(zip(names, values, strict=True), group=groups, deformable_group=offset_groups, with_bias=with_bias)


def run(operators, tensors, grad_output, geometry, device="cpu"):
    """Return output and gradients through the entry points, as mmcv's autograd function calls them."""
    t = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    grad_output = grad_output.to(device)
    output = torch.full_like(grad_output, 7.0)
    grads = {name: torch.zeros_like(tensor) for name, tensor in t.items() if tensor is not None}
    unused = output.new_empty(0)
    if t["mask"] is None:
        named = options(*geometry)
        operators.deform_conv_forward(t["input"], t["weight"], t["offset"], output, unused, unused, **named)
        operators.deform_conv_backward_input(
            t["input"], t["offset"], grad_output, grads["input"], grads["offset"], t["weight"], unused, **named
        )
        operators.deform_conv_backward_parameters(
            t["input"], t["offset"], grad_output, grads["weight"], unused, unused, scale=1, **named
        )
    else:
        named = modulated_options(*geometry)
        operators.modulated_deform_conv_forward(
            t["input"], t["weight"], t["bias"], unused, t["offset"], t["mask"], output, unused, **named
        )
        operators.modulated_deform_conv_backward(
            t["input"],
            t["weight"],
            t["bias"],
            unused,
            t["offset"],
            t["mask"],
            unused,
            *(grads[name] for name in ("input", "weight", "bias", "offset", "mask")),
            grad_output,
            **named,
        )
    return output, grads


def expected(tensors, grad_output, geometry):
    exact = {n: None if t is None else t.double().requires_grad_() for n, t in tensors.items()}
    output = reference_deform_conv(**exact, **dict(zip(GEOMETRY_NAMES, geometry, strict=True)))
    output.backward(grad_output.double())
    return output.detach(), {name: tensor.grad for name, tensor in exact.items() if tensor is not None}


GEOMETRY_NAMES = ("stride", "padding", "dilation", "groups", "offset_groups")


@pytest.mark.parametrize("modulated", [False, True])
@EVERY
def test_values_and_gradients(operators, device, stride, padding, dilation, groups, offset_groups, modulated):
    geometry = (stride, padding, dilation, groups, offset_groups)
    tensors, grad_output = problem(*geometry, modulated)
    wanted, wanted_grads = expected(tensors, grad_output, geometry)
    output, grads = run(operators, tensors, grad_output, geometry, device)
    torch.testing.assert_close(output.double().cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad.double().cpu(), wanted_grads[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("modulated", [False, True])
def test_half_precision_is_rounded_once(device, modulated, dtype):
    tensors, grad_output = problem(*GEOMETRIES[0], modulated, dtype)
    wanted, wanted_grads = expected(tensors, grad_output, GEOMETRIES[0])
    output, grads = run(torchvision_ops, tensors, grad_output, GEOMETRIES[0], device)
    for actual, exact in ((output, wanted), *((grad, wanted_grads[name]) for name, grad in grads.items())):
        assert actual.dtype == dtype
        error = (actual.double().cpu() - exact).abs()
        assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-4).all()


def test_gradients_are_added_and_scaled(device):
    tensors, grad_output = problem(*GEOMETRIES[0], False)
    _, alone = run(torchvision_ops, tensors, grad_output, GEOMETRIES[0], device)
    total = torch.full_like(alone["weight"], 2.0)
    t = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
    torchvision_ops.deform_conv_backward_parameters(
        t["input"], t["offset"], grad_output.to(device), total, total, total, scale=0.5, **options(*GEOMETRIES[0])
    )
    torch.testing.assert_close(total, 2 + alone["weight"] / 2)


@pytest.mark.parametrize("pack", [mmcv.ops.DeformConv2dPack, mmcv.ops.ModulatedDeformConv2dPack])
def test_through_mmcv(device, pack):
    """The layers of mmdet's DCN configs; every parameter gets a gradient."""
    torch.manual_seed(0)
    modulated = pack is mmcv.ops.ModulatedDeformConv2dPack
    layer = pack(4, 6, kernel_size=(3, 2), padding=1, groups=2, deform_groups=2, bias=modulated)
    layer = layer.to(device)
    torch.nn.init.normal_(layer.conv_offset.weight, std=0.3)
    x = torch.randn(2, 4, 5, 6, device=device, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in [x, *layer.parameters()])

    raw = layer.conv_offset(x).double().cpu()
    points = 2 * 3 * 2
    o1, o2, *mask = raw.split(points, 1)
    exact = reference_deform_conv(
        x.double().cpu(),
        layer.weight.double().cpu(),
        torch.cat((o1, o2), 1),
        mask[0].sigmoid() if modulated else None,
        layer.bias.double().cpu() if modulated else None,
        (1, 1),
        (1, 1),
        (1, 1),
        2,
        2,
    )
    torch.testing.assert_close(y.double().cpu(), exact, rtol=1e-4, atol=1e-4)

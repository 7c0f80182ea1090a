"""mmcv's deformable operators, with the calling conventions of its compiled extension.

Deformable convolution v1 (arXiv 1703.06211) and v2 (1811.11168) on torchvision,
multi-scale deformable attention (2010.04159) on mmcv's own PyTorch code, which
mmcv itself takes on the CPU. Gradients are autograd's of a second forward pass.
Half-precision inputs are computed in float32 and rounded once.

Shape legend: B images, C and O channels, g groups, G groups of offsets, kernel
h x w, output H' x W'.
"""

from collections.abc import Sequence

import torch
import torchvision
from torch import Tensor

from mmspectral.compat.precision import at_least_float32


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Write the deformable convolution of ``input`` [B, C, H, W] into ``output`` [B, O, H', W'].

    Args:
        input: Feature maps.
        weight: [O, C / g, h, w].
        offset: Of each sampling point, as y, x: [B, 2 * G * h * w, H', W'].
        output: Output.
        columns: Unused; a buffer.
        ones: Unused; a buffer.
        kW: Unused: w is read from ``weight``.
        kH: Unused: h is read from ``weight``.
        dW: Horizontal stride.
        dH: Vertical stride.
        padW: Horizontal padding.
        padH: Vertical padding.
        dilationW: Horizontal dilation.
        dilationH: Vertical dilation.
        group: Unused: g is read from ``weight``.
        deformable_group: Unused: G is read from ``offset``.
        im2col_step: Unused: images per step of mmcv's kernel.
    """
    output.copy_(_deform_conv(input, weight, offset, None, None, (dH, dW), (padH, padW), (dilationH, dilationW)))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Add the gradients of :func:`deform_conv_forward` to ``gradInput`` and ``gradOffset``."""
    geometry = ((dH, dW), (padH, padW), (dilationH, dilationW))
    _add_gradients(
        lambda x, o: _deform_conv(x, weight, o, None, None, *geometry),
        (input, offset),
        gradOutput,
        (gradInput, gradOffset),
    )


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """Add ``scale`` times the gradient of :func:`deform_conv_forward` to ``gradWeight``."""
    geometry = ((dH, dW), (padH, padW), (dilationH, dilationW))
    # gradWeight has the shape and dtype of the weight, and the gradient does not depend on the weight's values.
    _add_gradients(
        lambda w: scale * _deform_conv(input, w, offset, None, None, *geometry),
        (gradWeight,),
        gradOutput,
        (gradWeight,),
    )


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Write the modulated deformable convolution of ``input`` into ``output``.

    Args are those of :func:`deform_conv_forward` under other names, and

    Args:
        mask: Factor of each sampling point, [B, G * h * w, H', W'].
        bias: [O], read only with ``with_bias``.
        with_bias: Whether there is a bias.
    """
    geometry = ((stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w))
    output.copy_(_deform_conv(input, weight, offset, mask, bias if with_bias else None, *geometry))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Add the gradients of :func:`modulated_deform_conv_forward` to the ``grad_`` tensors."""
    geometry = ((stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w))
    _add_gradients(
        lambda x, w, o, m: _deform_conv(x, w, o, m, None, *geometry),
        (input, weight, offset, mask),
        grad_output,
        (grad_input, grad_weight, grad_offset, grad_mask),
    )
    if with_bias:
        grad_bias.add_(at_least_float32(grad_output).sum((0, 2, 3)))


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Return multi-scale deformable attention [B, queries, heads * d].

    Args:
        value: [B, sum of H * W, heads, d], level after level.
        value_spatial_shapes: H, W of each level, [levels, 2].
        value_level_start_index: Unused: follows from the shapes.
        sampling_locations: x, y in [0, 1], [B, queries, heads, levels, points, 2].
        attention_weights: [B, queries, heads, levels, points].
        im2col_step: Unused: images per step of mmcv's kernel.
    """
    attended = _ms_deform_attn(value, value_spatial_shapes, sampling_locations, attention_weights)
    return attended.to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Add the gradients of :func:`ms_deform_attn_forward` to the ``grad_`` tensors."""
    _add_gradients(
        lambda v, locations, weights: _ms_deform_attn(v, value_spatial_shapes, locations, weights),
        (value, sampling_locations, attention_weights),
        grad_output,
        (grad_value, grad_sampling_loc, grad_attn_weight),
    )


def _deform_conv(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    input, weight, offset = map(at_least_float32, (input, weight, offset))
    mask, bias = (None if t is None else at_least_float32(t) for t in (mask, bias))
    return torchvision.ops.deform_conv2d(input, offset, weight, bias, stride, padding, dilation, mask)


def _ms_deform_attn(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch  # imports this module's module

    return multi_scale_deformable_attn_pytorch(
        at_least_float32(value), shapes, at_least_float32(locations), at_least_float32(weights)
    )


def _add_gradients(function, inputs: Sequence[Tensor], grad_output: Tensor, sums: Sequence[Tensor]) -> None:
    """Add the gradient of ``function`` at ``inputs`` to ``sums``, found in float32 or better."""
    leaves = [at_least_float32(tensor).detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, at_least_float32(grad_output))
    for total, gradient in zip(sums, gradients, strict=True):
        total.add_(gradient)

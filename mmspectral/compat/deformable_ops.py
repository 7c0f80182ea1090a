"""mmcv's multi-scale deformable attention (arXiv 2010.04159), with the calling conventions of its compiled extension.

It runs on mmcv's own PyTorch code, which mmcv itself takes on the CPU. Gradients are autograd's of a second forward
pass. Half-precision inputs are computed in float32 and rounded once.
"""

import torch
from torch import Tensor

from mmspectral.compat.precision import at_least_float32


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
    return _ms_deform_attn(value, value_spatial_shapes, sampling_locations, attention_weights).to(value.dtype)


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
    inputs = (value, sampling_locations, attention_weights)
    leaves = [at_least_float32(tensor).detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = _ms_deform_attn(leaves[0], value_spatial_shapes, *leaves[1:])
    gradients = torch.autograd.grad(output, leaves, at_least_float32(grad_output))
    for total, gradient in zip((grad_value, grad_sampling_loc, grad_attn_weight), gradients, strict=True):
        total.add_(gradient)


def _ms_deform_attn(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch  # imports mmcv._ext, which is us

    return multi_scale_deformable_attn_pytorch(
        at_least_float32(value), shapes, at_least_float32(locations), at_least_float32(weights)
    )

"""mmcv's operators on torchvision, with the calling conventions of its compiled extension.

What Mask R-CNN, one-stage detectors, deformable DETRs and Mask2Former need; any other operator raises when it is
called. Half-precision inputs are computed in float32 and rounded once: torchvision's CPU kernels refuse bfloat16.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

__all__ = [
    "get_compiler_version",
    "get_compiling_cuda_version",
    "ms_deform_attn_backward",
    "ms_deform_attn_forward",
    "nms",
    "roi_align_backward",
    "roi_align_forward",
    "sigmoid_focal_loss_backward",
    "sigmoid_focal_loss_forward",
    "softnms",
]

HOW_TO_COMPILE = (
    "install mmcv with its compiled operators: a prebuilt wheel or a source build of onedl-mmcv "
    "for your torch and CUDA, or `mim install mmcv` for the original packages"
)


def unavailable(name: str) -> Callable:
    """Return what stands in for an operator that is not served: it raises when it is called.

    Raises:
        AttributeError: The name begins with an underscore, so it is none of mmcv's operators.
    """
    if name.startswith("_"):
        raise AttributeError(f"module 'mmcv._ext' has no attribute {name!r}")

    def operator(*args, **kwargs):
        raise RuntimeError(
            f"mmcv's operator {name!r} is not available: mmcv has no compiled extension here, and mmspectral serves "
            "only nms, soft-nms, average RoIAlign, sigmoid focal loss and multi-scale deformable attention. "
            f"To use it, {HOW_TO_COMPILE}."
        )

    operator.__name__ = name
    return operator


def get_compiler_version() -> str:
    """Say for mmcv's environment report that nothing was compiled."""
    return "not compiled (torchvision operators by mmspectral)"


get_compiling_cuda_version = get_compiler_version


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the kept ones of ``boxes`` [N, 4] (x1, y1, x2, y2) by falling score.

    Equal scores keep the order of the input, which mmcv's sort leaves open. With ``offset`` 1, x2 and y2 are the last
    pixels inside a box.
    """
    boxes, scores = _with_offset(_at_least_float32(boxes), offset), _at_least_float32(scores)
    # mmcv compares in the precision of the boxes: an IoU of 0.1 is not above a threshold of 0.1.
    threshold = torch.tensor(iou_threshold, dtype=boxes.dtype).item()
    return torchvision.ops.nms(boxes, scores, threshold)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Run soft-NMS (arXiv 1704.04503): write kept boxes and decayed scores into ``dets`` [N, 5], return their indices.

    Methods 0 (drop) and 1 (linear) decay scores [N] from an overlap of ``iou_threshold``, method 2 (Gaussian) by the
    squared overlap over ``sigma``; below ``min_score`` a box of ``boxes`` [N, 4] is dropped. Two boxes without area do
    not overlap; mmcv's 0 / 0 turns their scores into NaN.
    """
    corners, left = _with_offset(_at_least_float32(boxes), offset), _at_least_float32(scores).clone()
    waiting = torch.arange(len(boxes), device=boxes.device)
    kept: list[Tensor] = []
    while waiting.numel():
        best = left[waiting].argmax()
        index = waiting[best].clone()
        dets[len(kept), :4], dets[len(kept), 4] = boxes[index], left[index]
        kept.append(index)
        # Equal scores are taken in the order of the queue, so the queue is kept in mmcv's order:
        # its first box moves to where the best one stood.
        waiting[best] = waiting[0]
        waiting = waiting[1:]
        overlap = torchvision.ops.box_iou(corners[index][None], corners[waiting])[0].nan_to_num()
        if method == 2:
            left[waiting] *= torch.exp(-overlap.square() / sigma)
        else:
            decay = torch.zeros_like(overlap) if method == 0 else 1 - overlap
            left[waiting] *= torch.where(overlap >= iou_threshold, decay, torch.ones_like(overlap))
        keep = left[waiting] >= min_score
        count = int(keep.sum())
        queue = waiting[:count].clone()
        queue[~keep[:count]] = waiting[count:][keep[count:]].flip(0)  # gaps are filled from the end
        waiting = queue
    return torch.stack(kept) if kept else waiting


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, *args, **kwargs
) -> None:
    """Write average RoIAlign (arXiv 1703.06870) of ``input`` [B, C, H, W] into ``output`` [K, C, h, w].

    ``rois`` [K, 5] hold an index into the batch, x1, y1, x2, y2. ``argmax_y`` and ``argmax_x``, which belong to the
    maximum, are not used. The others are ``aligned_height``, ``aligned_width``, ``spatial_scale``, ``sampling_ratio``,
    ``pool_mode`` and ``aligned``.

    Raises:
        RuntimeError: ``pool_mode`` is not 1, the average.
    """
    output.copy_(_roi_align(_at_least_float32(input), rois, *args, **kwargs))


def roi_align_backward(
    grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor, grad_input: Tensor, *args, **kwargs
) -> None:
    """Add the gradient of :func:`roi_align_forward`, which has the same settings, to ``grad_input`` [B, C, H, W]."""
    # RoIAlign is linear, so any features of this shape have the same gradient. Going through torchvision's public
    # function costs a forward pass, but its backward kernel refuses to run on CUDA under
    # torch.use_deterministic_algorithms, where that function takes another way (pytorch/vision#7579).
    features = _at_least_float32(grad_input).detach().requires_grad_()
    with torch.enable_grad():
        pooled = _roi_align(features, rois, *args, **kwargs)
    grad_input.add_(torch.autograd.grad(pooled, features, _at_least_float32(grad_output))[0])


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the focal loss (arXiv 1708.02002) of logits [N, C] and labels [N] into ``output`` [N, C].

    A label outside 0..C-1 makes its row background. ``weight`` is empty or has one factor per class; background has 1.
    """
    output.copy_(_focal_loss(_at_least_float32(input), target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Write the gradient of the summed :func:`sigmoid_focal_loss_forward` into ``grad_input`` [N, C]."""
    logits = _at_least_float32(input).detach().requires_grad_()
    with torch.enable_grad():
        loss = _focal_loss(logits, target, weight, gamma, alpha).sum()
    grad_input.copy_(torch.autograd.grad(loss, logits)[0])


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Return multi-scale deformable attention (arXiv 2010.04159), [B, queries, heads * d].

    It runs on mmcv's own PyTorch code, which mmcv itself takes on the CPU, with its shapes;
    ``value_level_start_index``, which follows from the spatial shapes, and ``im2col_step`` are not used.
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
    """Add the gradients of :func:`ms_deform_attn_forward`, those of a second forward pass, to the ``grad_`` tensors."""
    inputs = (value, sampling_locations, attention_weights)
    leaves = [_at_least_float32(tensor).detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = _ms_deform_attn(leaves[0], value_spatial_shapes, *leaves[1:])
    gradients = torch.autograd.grad(output, leaves, _at_least_float32(grad_output))
    for total, gradient in zip((grad_value, grad_sampling_loc, grad_attn_weight), gradients, strict=True):
        total.add_(gradient)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, any other as it is."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _ms_deform_attn(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch  # imports mmcv._ext, this module

    return multi_scale_deformable_attn_pytorch(
        _at_least_float32(value), shapes, _at_least_float32(locations), _at_least_float32(weights)
    )


def _roi_align(
    features: Tensor,
    rois: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> Tensor:
    if pool_mode != 1:
        raise RuntimeError(f"torchvision has no RoIAlign with pool_mode='max'; use 'avg', or {HOW_TO_COMPILE}.")
    size = (aligned_height, aligned_width)
    return torchvision.ops.roi_align(features, rois.to(features), size, spatial_scale, sampling_ratio, aligned)


def _focal_loss(logits: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    classes = torch.arange(logits.shape[1], device=logits.device)
    positive = target[:, None] == classes
    margin = torch.where(positive, logits, -logits)
    # torchvision.ops.sigmoid_focal_loss takes a power of 1 - p, which is 0 for a confident logit: its gradient is NaN
    # for gamma below 1. In logarithms nothing is rounded away.
    unbalanced = -torch.exp(gamma * F.logsigmoid(-margin)) * F.logsigmoid(margin)
    loss = torch.where(positive, alpha * unbalanced, (1 - alpha) * unbalanced)
    if weight.numel():
        # The background row of weight is the last one, where -1 and C both lead.
        rows = torch.where(positive.any(dim=1), target, -1)
        loss = loss * F.pad(_at_least_float32(weight), (0, 1), value=1.0)[rows][:, None]
    return loss


def _with_offset(boxes: Tensor, offset: int) -> Tensor:
    """Turn inclusive far corners into exclusive ones: widths become x2 - x1 + offset."""
    return boxes + boxes.new_tensor([0, 0, offset, offset]) if offset else boxes

"""mmcv's RoIPool (arXiv 1504.08083), with the calling conventions of its compiled extension.

Written out here: torchvision's ``roi_pool`` rounds the corners of a box to whole
pixels first, which mmcv's does not, so they pool other bins.
"""

import torch
from torch import Tensor

from mmspectral.compat.precision import at_least_float32


def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Write the largest value of each bin into ``output`` [K, C, h, w] and where it lies into ``argmax``.

    Bin i of a side spans the pixels from floor(start + i * size) to
    ceil(start + (i + 1) * size), cut at the border. A bin without pixels has
    value 0 and argmax -1.

    Args:
        input: Feature maps [B, C, H, W].
        rois: [K, 5] as index into the batch, x1, y1, x2, y2, of which x2 and y2 are the last pixels inside.
        output: Output.
        argmax: Output, y * W + x [K, C, h, w].
        pooled_height: h.
        pooled_width: w.
        spatial_scale: Factor from the boxes' coordinates to those of the feature maps.
    """
    B, C, H, W = input.shape
    boxes = at_least_float32(rois)
    top, bottom = _bins(boxes[:, 2] * spatial_scale, (boxes[:, 4] + 1) * spatial_scale, pooled_height, H)
    left, right = _bins(boxes[:, 1] * spatial_scale, (boxes[:, 3] + 1) * spatial_scale, pooled_width, W)
    output.zero_()
    argmax.fill_(-1)
    for k, image in enumerate(rois[:, 0].long().tolist()):
        rows, columns = _pixels(top[k], bottom[k]), _pixels(left[k], right[k])
        if rows is None or columns is None:
            continue
        # [C, h, w, rows of a bin * columns of a bin]; a bin smaller than the largest repeats its last pixels.
        places = (rows[:, None, :, None] * W + columns[None, :, None, :]).flatten(2)
        values, which = input[image].flatten(1)[:, places].max(dim=-1)
        filled = (top[k] < bottom[k])[:, None] & (left[k] < right[k])[None, :]  # [h, w]
        where = places.expand(C, *places.shape).gather(-1, which[..., None]).squeeze(-1)
        output[k] = torch.where(filled, values, torch.zeros_like(values))
        argmax[k] = torch.where(filled, where, torch.full_like(where, -1)).to(argmax.dtype)


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Add the gradient of :func:`roi_pool_forward` to ``grad_input`` [B, C, H, W]."""
    B, C, H, W = grad_input.shape
    channel = torch.arange(C, device=rois.device)[None, :, None, None]
    plane = rois[:, 0].long()[:, None, None, None] * C + channel  # [K, C, 1, 1]
    filled = argmax >= 0
    places = (plane * (H * W) + argmax)[filled]
    total = at_least_float32(grad_input.new_zeros(B * C * H * W))
    total.index_add_(0, places, grad_output[filled].to(total.dtype))
    grad_input.add_(total.view(B, C, H, W))


def _bins(start: Tensor, end: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return first and one past the last pixel of each bin, each [K, count]; equal where there is none."""
    step = (end - start)[:, None] / count
    i = torch.arange(count, device=start.device, dtype=start.dtype)
    first = (i * step + start[:, None]).floor().clamp(0, size).long()
    past = ((i + 1) * step + start[:, None]).ceil().clamp(0, size).long()
    return first, torch.where(step > 0, past, first)


def _pixels(first: Tensor, past: Tensor) -> Tensor | None:
    """Return the pixels of each bin [count, longest], the last one repeated; None if no bin has any."""
    longest = int((past - first).max())
    if longest <= 0:
        return None
    steps = torch.arange(longest, device=first.device)
    return torch.minimum(first[:, None] + steps, (past - 1).clamp(min=0)[:, None])

"""NMS and soft-NMS against loops over pairs of boxes in float64."""

import math

import mmcv.ops
import numpy as np
import pytest
import torch

from mmspectral.compat import torchvision_ops
from tests.helpers import assert_rounded_once


def overlap(a, b, offset):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    areas = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    union = sum(areas) - width * height
    return width * height / union if union else 0.0


def reference_nms(boxes, scores, threshold, offset):
    boxes, scores = boxes.double().tolist(), scores.double().tolist()
    kept = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if all(overlap(boxes[i], boxes[k], offset) <= threshold for k in kept):
            kept.append(i)
    return kept


def reference_softnms(boxes, scores, threshold, sigma, min_score, method, offset):
    """mmcv's loop: the best box changes places with the first, a dropped one with the last."""
    boxes, scores = boxes.double().tolist(), scores.double().tolist()
    queue, first = list(range(len(scores))), 0
    while first < len(queue):
        best = max(range(first, len(queue)), key=lambda p: scores[queue[p]])
        queue[first], queue[best] = queue[best], queue[first]
        p = first + 1
        while p < len(queue):
            iou = overlap(boxes[queue[first]], boxes[queue[p]], offset)
            if method == 2:
                scores[queue[p]] *= math.exp(-(iou**2) / sigma)
            elif iou >= threshold:
                scores[queue[p]] *= 0 if method == 0 else 1 - iou
            if scores[queue[p]] < min_score:
                queue[p] = queue[-1]
                queue.pop()
            else:
                p += 1
        first += 1
    return queue, [[*boxes[i], scores[i]] for i in queue]


def crowd(count, seed, device="cpu"):
    """Boxes on a coarse grid, so that many overlap, and scores with ties."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 30, (count, 2), generator=generator).float()
    size = torch.randint(1, 17, (count, 2), generator=generator).float()
    scores = torch.randint(1, 40, (count,), generator=generator) / 40
    return torch.cat((corner, corner + size), 1).to(device), scores.to(device)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.35, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 57])
def test_nms(operators, device, count, threshold, offset):
    boxes, scores = crowd(count, seed=count, device=device)
    if operators is not torchvision_ops:
        scores = scores + torch.arange(count, device=device) * 1e-4  # mmcv's sort leaves the order of ties open
    kept = operators.nms(boxes, scores, iou_threshold=threshold, offset=offset)
    assert kept.dtype == torch.int64 and kept.device.type == device
    assert kept.tolist() == reference_nms(boxes, scores, threshold, offset)


def test_offset_counts_the_last_pixel(operators):
    # 2 x 2 pixels against 2 x 1: IoU 1/2 with the last pixel inside; without it the second box has no area.
    boxes, scores = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, 0]]), torch.tensor([0.9, 0.8])
    assert operators.nms(boxes, scores, iou_threshold=0.4, offset=1).tolist() == [0]
    assert operators.nms(boxes, scores, iou_threshold=0.4, offset=0).tolist() == [0, 1]


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.3, 0.6, 0.7, 0.9])
def test_nms_keeps_a_box_at_the_threshold(operators, threshold):
    """The IoU of these two is the float32 number nearest the threshold, which may lie above the float64 one."""
    boxes = torch.tensor([[0.0, 0, 10, 1], [0, 0, 10 * threshold, 1]])
    kept = operators.nms(boxes, torch.tensor([0.9, 0.8]), iou_threshold=threshold, offset=0)
    assert kept.tolist() == [0, 1]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("method", [0, 1, 2])
@pytest.mark.parametrize("min_score", [0.0, 0.001, 0.3])
@pytest.mark.parametrize("count", [1, 2, 41])
def test_softnms(operators, count, min_score, method, offset):
    boxes, scores = crowd(count, seed=count + 100)
    if method:  # ties stay ties only where no decay is rounded
        scores = torch.rand(count, generator=torch.Generator().manual_seed(count))
    given, dets = scores.clone(), torch.full((count, 5), -1.0)
    parameters = (0.3, 0.5, min_score, method, offset)
    kept = operators.softnms(boxes, scores, dets, *parameters)
    expected, rows = reference_softnms(boxes, scores, *parameters)
    assert kept.tolist() == expected
    torch.testing.assert_close(dets[: len(kept)].double(), torch.tensor(rows).double(), rtol=1e-5, atol=1e-6)
    assert (dets[len(kept) :] == -1).all()
    assert torch.equal(scores, given), "the caller's scores were changed"


def test_boxes_without_area_do_not_become_nan():
    boxes, dets = torch.tensor([[1.0, 1, 1, 1]] * 3), torch.zeros(3, 5)
    kept = torchvision_ops.softnms(boxes, torch.tensor([0.5, 0.9, 0.7]), dets, 0.3, 0.5, 0.01, 2, 0)
    assert kept.tolist() == [1, 2, 0]
    assert dets[:, 4].tolist() == pytest.approx([0.9, 0.7, 0.5])


def test_no_boxes(operators, device):
    boxes, scores = torch.zeros(0, 4, device=device), torch.zeros(0, device=device)
    kept = operators.nms(boxes, scores, iou_threshold=0.5, offset=1)
    assert kept.shape == (0,) and kept.dtype == torch.int64 and kept.device.type == device
    kept = operators.softnms(boxes.cpu(), scores.cpu(), torch.zeros(0, 5), 0.3, 0.5, 0.001, 1, 0)
    assert kept.shape == (0,) and kept.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_the_same_boxes(device, dtype):
    boxes, scores = crowd(23, seed=5, device=device)  # these coordinates are exact in either type
    scores = (torch.randperm(23, generator=torch.Generator().manual_seed(6)) / 32).to(device)
    kept = torchvision_ops.nms(boxes.to(dtype), scores.to(dtype), iou_threshold=0.5, offset=0)
    assert kept.tolist() == reference_nms(boxes, scores, 0.5, 0)
    dets = torch.zeros(23, 5, dtype=dtype, device=device)
    kept = torchvision_ops.softnms(boxes.to(dtype), scores.to(dtype), dets, 0.3, 0.5, 0.05, 1, 0)
    expected, rows = reference_softnms(boxes, scores, 0.3, 0.5, 0.05, 1, 0)
    assert kept.tolist() == expected
    assert_rounded_once(dets[: len(kept)], torch.tensor(rows).double())


@pytest.mark.parametrize("nms_type", ["nms", "soft_nms"])
@pytest.mark.parametrize("class_agnostic", [False, True])
def test_batched_nms_of_mmcv(nms_type, class_agnostic):
    boxes, _ = crowd(48, seed=9)
    scores = torch.randperm(48, generator=torch.Generator().manual_seed(1)) / 48 + 0.01
    classes = torch.arange(48) % 3
    config = dict(type=nms_type, iou_threshold=0.4)
    dets, kept = mmcv.ops.batched_nms(boxes, scores, classes, config, class_agnostic)
    groups = [torch.arange(48)] if class_agnostic else [torch.nonzero(classes == c).flatten() for c in range(3)]
    expected = []
    for group in groups:
        if nms_type == "nms":
            chosen = reference_nms(boxes[group], scores[group], 0.4, 0)
            expected += [(scores[group[i]].item(), group[i].item()) for i in chosen]
        else:
            chosen, rows = reference_softnms(boxes[group], scores[group], 0.4, 0.5, 0.001, 1, 0)
            expected += [(row[4], group[i].item()) for i, row in zip(chosen, rows, strict=True)]
    expected.sort(reverse=True)
    assert kept.tolist() == [index for _, index in expected]
    assert dets[:, 4].tolist() == pytest.approx([score for score, _ in expected], rel=1e-4)
    assert torch.equal(dets[:, :4], boxes[kept])


def test_score_threshold_and_numpy_of_mmcv():
    boxes, scores = crowd(31, seed=2)
    dets, kept = mmcv.ops.nms(boxes.numpy(), scores.numpy(), 0.5, score_threshold=0.4, max_num=5)
    likely = torch.nonzero(scores > 0.4).flatten()
    expected = likely[reference_nms(boxes[likely], scores[likely], 0.5, 0)][:5]
    assert isinstance(dets, np.ndarray) and kept.tolist() == expected.tolist()
    assert dets.tolist() == torch.cat((boxes, scores[:, None]), 1)[expected].tolist()

"""mmcv's operators on torchvision, and mmcv's compiled ones where it has them, against references in float64."""

import math
from collections.abc import Callable
from typing import NamedTuple

import mmcv.ops
import pytest
import torch
import torch.nn.functional as F
import torchvision
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction, multi_scale_deformable_attn_pytorch

from mmspectral.compat import mmcv_ops_backend, torchvision_ops
from tests.helpers import assert_rounded_once

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


class Problem(NamedTuple):
    """An operator's differentiable inputs, and how it and its reference are called on them."""

    reference: Callable  # leaves -> output
    run: Callable  # operators, leaves, grad_output, what gradients are added to -> output and gradients
    leaves: list[torch.Tensor]
    grad_output: torch.Tensor
    rtol: float = 1e-5
    atol: float = 1e-5
    compiled_for_cpu: bool = False

    def expected(self):
        leaves = [t.double().requires_grad_() for t in self.leaves]
        output = self.reference(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, self.grad_output.double())]

    def results(self, operators, device="cpu", start=2.0):
        """Return the output and the gradients, which must be added to ``start``."""
        leaves = [t.to(device) for t in self.leaves]
        return self.run(operators, leaves, self.grad_output.to(device), start)

    def check(self, results):
        for actual, wanted in zip(results, self.expected(), strict=True):
            torch.testing.assert_close(actual.double().cpu(), wanted, rtol=self.rtol, atol=self.atol)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def roi_align(scale=0.25, ratio=0, aligned=True, dtype=torch.float32, rois=ROIS, **tolerances):
    options = dict(aligned_height=SIZE[0], aligned_width=SIZE[1], spatial_scale=scale)
    options |= dict(sampling_ratio=ratio, pool_mode=1, aligned=aligned)

    def run(operators, leaves, grad_output, start):
        (features,), given = leaves, rois.to(grad_output)
        output, unused, gradient = torch.full_like(grad_output, 7.0), features.new_zeros(0), features * 0 + start
        operators.roi_align_forward(features, given, output, unused, unused, **options)
        operators.roi_align_backward(grad_output, given, unused, unused, gradient, **options)
        return output, gradient - start

    def reference(features):
        return torchvision.ops.roi_align(features, rois.double(), SIZE, scale, ratio, aligned)

    grad_output = random(len(rois), 2, *SIZE, seed=1).to(dtype)
    features = random(3, 2, 11, 13).to(dtype)
    return Problem(reference, run, [features], grad_output, compiled_for_cpu=True, **tolerances)


TARGET = torch.tensor([0, 4, 2, 5, 1, 5, 3, 0, 2])  # 5 is background
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.5, 3.0])
LOGITS = random(9, 5) * 3
# In float32, 1 - p is 0 for these where p is near 1, and its powers below 1 have no derivative there.
CONFIDENT = torch.tensor([[20.0, -25.0], [-20.0, 25.0], [30.0, -30.0]])


def focal_loss(gamma=2.0, alpha=0.25, weight=WEIGHT, target=TARGET, logits=LOGITS, dtype=torch.float32, atol=1e-6):
    weight = weight.to(dtype)  # exact in any type

    def run(operators, leaves, grad_output, start):
        results = [torch.full_like(leaves[0], 7.0) for _ in range(2)]
        for name, result in zip(("forward", "backward"), results, strict=True):
            operator = getattr(operators, f"sigmoid_focal_loss_{name}")
            given = (target.to(result.device), weight.to(result.device), result)
            operator(leaves[0], *given, gamma=gamma, alpha=alpha)
        return results

    def reference(logits):
        positive = target[:, None] == torch.arange(logits.shape[1])
        p, not_p = logits.sigmoid(), (-logits).sigmoid()
        foreground, background = not_p**gamma * F.softplus(-logits), p**gamma * F.softplus(logits)
        loss = torch.where(positive, alpha * foreground, (1 - alpha) * background)
        if not len(weight):
            return loss
        known = positive.any(1)
        return loss * torch.where(known, weight.double()[target.where(known, 0)], 1.0)[:, None]

    return Problem(reference, run, [logits.to(dtype)], torch.ones_like(logits), atol=atol)


SHAPES = [(4, 6), (3, 2), (1, 1)]
B, QUERIES, HEADS, D, POINTS = 2, 3, 2, 4, 2


def deformable_attention(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(B, sum(h * w for h, w in SHAPES), HEADS, D, generator=generator)
    locations = 1.4 * torch.rand(B, QUERIES, HEADS, len(SHAPES), POINTS, 2, generator=generator) - 0.2
    weights = torch.rand(B, QUERIES, HEADS, len(SHAPES), POINTS, generator=generator)
    grad_output = torch.randn(B, QUERIES, HEADS * D, generator=generator).to(dtype)

    def run(operators, leaves, grad_output, start):
        gradients, shapes = [leaf * 0 + start for leaf in leaves], level_shapes(grad_output.device)
        given = (leaves[0], *shapes, *leaves[1:])
        output = operators.ms_deform_attn_forward(*given, im2col_step=64)
        operators.ms_deform_attn_backward(*given, grad_output, *gradients, im2col_step=64)
        return output, *(gradient - start for gradient in gradients)

    def reference(value, locations, weights):
        return multi_scale_deformable_attn_pytorch(value, torch.tensor(SHAPES), locations, weights)

    leaves = [t.to(dtype) for t in (value, locations, weights)]
    return Problem(reference, run, leaves, grad_output, rtol=1e-4, atol=1e-4)


def level_shapes(device):
    shapes = torch.tensor(SHAPES, device=device)
    return shapes, torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))


@pytest.mark.parametrize(
    "problem",
    [
        *(roi_align(s, r, a) for s in (0.25, 1.0) for r in (0, 2) for a in (False, True)),
        *(focal_loss(gamma, alpha, WEIGHT[:0]) for gamma in (0.0, 0.5, 2.0) for alpha in (0.25, 0.9)),
        # The compiled operator reads beyond the weights of a background row.
        *(focal_loss(gamma, alpha, target=TARGET.clamp(max=4)) for gamma in (0.0, 0.5, 2.0) for alpha in (0.25, 0.9)),
        deformable_attention(),
        roi_align(rois=ROIS[:0]),
    ],
)
def test_values_and_gradients(problem, operators, device):
    if device == "cpu" and operators is not torchvision_ops and not problem.compiled_for_cpu:
        pytest.skip("mmcv compiles this operator for devices only")
    assert problem.grad_output.numel() == 0 or problem.expected()[1].abs().sum() > 0
    problem.check(problem.results(operators, device))


@pytest.mark.parametrize(
    "problem",
    [
        roi_align(ratio=2, dtype=torch.float64, rtol=1e-12, atol=1e-12),
        *(focal_loss(target=torch.where(TARGET == 5, label, TARGET)) for label in (5, -1, 255, -100)),
        *(focal_loss(g, 0.25, WEIGHT[:0], torch.tensor([0, 0, 1]), CONFIDENT, atol=0) for g in (0.5, 2.0)),
        *(focal_loss(weight=weight, target=TARGET[:0], logits=LOGITS[:0]) for weight in (WEIGHT, WEIGHT[:0])),
    ],
)
def test_what_the_compiled_operators_do_not_promise(problem, device):
    problem.check(problem.results(torchvision_ops, device))


@HALF
@pytest.mark.parametrize("make", [roi_align, focal_loss, deformable_attention])
def test_half_precision_is_rounded_once(make, device, dtype):
    problem = make(dtype=dtype)
    for actual, wanted in zip(problem.results(torchvision_ops, device, start=0.0), problem.expected(), strict=True):
        assert actual.dtype == dtype
        assert_rounded_once(actual, wanted, slack=problem.atol)


def test_maximum_is_refused():
    features, pooled, unused = torch.zeros(3, 2, 4, 4), torch.zeros(len(ROIS), 2, 1, 1), torch.zeros(0)
    with pytest.raises(RuntimeError, match="pool_mode='max'.*use 'avg'"):
        torchvision_ops.roi_align_forward(features, ROIS, pooled, unused, unused, 1, 1, 1.0, 0, 0, True)


def roi_align_of_mmcv(features):
    return mmcv.ops.RoIAlign(SIZE, spatial_scale=0.25, sampling_ratio=0)(features, ROIS.to(features.device))


def focal_loss_of_mmcv(logits):
    return mmcv.ops.sigmoid_focal_loss(logits, TARGET.to(logits.device), 2.0, 0.25, None, "none")


def deformable_attention_of_mmcv(value, locations, weights):
    """On the CPU mmcv's module takes its PyTorch code; on CUDA this function, whatever serves ``mmcv._ext``."""
    return MultiScaleDeformableAttnFunction.apply(value, *level_shapes(value.device), locations, weights, 64)


@pytest.mark.parametrize(
    ("problem", "call", "deterministic"),
    [
        (roi_align(), roi_align_of_mmcv, False),
        (roi_align(), roi_align_of_mmcv, True),
        (focal_loss(weight=WEIGHT[:0]), focal_loss_of_mmcv, False),
        (deformable_attention(), deformable_attention_of_mmcv, False),
    ],
)
def test_operators_through_mmcv(problem, call, deterministic, device):
    """As mmdet calls them; a gradient that is not contiguous reaches the operator."""
    if device == "cpu" and mmcv_ops_backend() == "compiled" and not problem.compiled_for_cpu:
        pytest.skip("mmcv compiles this operator for devices only")
    leaves = [leaf.to(device, copy=True).requires_grad_() for leaf in problem.leaves]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        output = call(*leaves)
        output.backward(problem.grad_output.to(device).mT.contiguous().mT)
    finally:
        torch.use_deterministic_algorithms(before)
    problem.check([output.detach(), *(leaf.grad for leaf in leaves)])


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
@pytest.mark.parametrize("count", [0, 1, 2, 57])
def test_nms(operators, device, count, threshold, offset):
    boxes, scores = crowd(count, seed=count, device=device)
    if operators is not torchvision_ops:
        scores = scores + torch.arange(count, device=device) * 1e-4  # mmcv's sort leaves the order of ties open
    kept = operators.nms(boxes, scores, iou_threshold=threshold, offset=offset)
    assert kept.dtype == torch.int64 and kept.device.type == device
    assert kept.tolist() == reference_nms(boxes, scores, threshold, offset)


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.3, 0.6, 0.7, 0.9])
def test_nms_keeps_a_box_at_the_threshold(operators, threshold):
    """The IoU of these two is the float32 number nearest the threshold, which may lie above the float64 one."""
    boxes = torch.tensor([[0.0, 0, 10, 1], [0, 0, 10 * threshold, 1]])
    kept = operators.nms(boxes, torch.tensor([0.9, 0.8]), iou_threshold=threshold, offset=0)
    assert kept.tolist() == [0, 1]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("method", [0, 1, 2])
@pytest.mark.parametrize("min_score", [0.0, 0.001, 0.3])
@pytest.mark.parametrize("count", [0, 1, 2, 41])
def test_softnms(operators, count, min_score, method, offset):
    boxes, scores = crowd(count, seed=count + 100)
    if method:  # ties stay ties only where no decay is rounded
        scores = torch.rand(count, generator=torch.Generator().manual_seed(count))
    given, dets = scores.clone(), torch.full((count, 5), -1.0)
    parameters = (0.3, 0.5, min_score, method, offset)
    kept = operators.softnms(boxes, scores, dets, *parameters)
    expected, rows = reference_softnms(boxes, scores, *parameters)
    assert kept.tolist() == expected and kept.dtype == torch.int64
    rows = torch.tensor(rows).double().view(-1, 5)
    torch.testing.assert_close(dets[: len(kept)].double(), rows, rtol=1e-5, atol=1e-6)
    assert (dets[len(kept) :] == -1).all()
    assert torch.equal(scores, given), "the caller's scores were changed"


def test_boxes_without_area_do_not_become_nan():
    boxes, dets = torch.tensor([[1.0, 1, 1, 1]] * 3), torch.zeros(3, 5)
    kept = torchvision_ops.softnms(boxes, torch.tensor([0.5, 0.9, 0.7]), dets, 0.3, 0.5, 0.01, 2, 0)
    assert kept.tolist() == [1, 2, 0]
    assert dets[:, 4].tolist() == pytest.approx([0.9, 0.7, 0.5])


@HALF
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
def test_batched_nms_of_mmcv(nms_type):
    boxes, _ = crowd(48, seed=9)
    scores = torch.randperm(48, generator=torch.Generator().manual_seed(1)) / 48 + 0.01
    classes = torch.arange(48) % 3
    dets, kept = mmcv.ops.batched_nms(boxes, scores, classes, dict(type=nms_type, iou_threshold=0.4))
    expected = []
    for group in (torch.nonzero(classes == c).flatten() for c in range(3)):
        if nms_type == "nms":
            chosen = reference_nms(boxes[group], scores[group], 0.4, 0)
            rows = [[scores[group[i]].item()] for i in chosen]
        else:
            chosen, rows = reference_softnms(boxes[group], scores[group], 0.4, 0.5, 0.001, 1, 0)
        expected += [(row[-1], group[i].item()) for i, row in zip(chosen, rows, strict=True)]
    expected.sort(reverse=True)
    assert kept.tolist() == [index for _, index in expected]
    assert dets[:, 4].tolist() == pytest.approx([score for score, _ in expected], rel=1e-4)
    assert torch.equal(dets[:, :4], boxes[kept])

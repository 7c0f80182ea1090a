"""Training W under W + C with a constant C is training W' = W + C from a shifted start.

Weight decay then pulls W' towards C. It holds for optimizers that see only
gradients; Adafactor scales its step by the size of the parameter, so there it fails.
"""

import copy
import functools

import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from torch import nn

from mmspectral.layers import IdentityCorrection, condition_linear, fold, unfold

STEPS, LR, DECAY = 10, 1e-3, 0.1


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        return self.head(self.qkv(x).sin())


@torch.no_grad()
def pull(model, targets, decoupled):
    """Decay weights towards targets instead of 0, decoupled as in AdamW or as part of the gradient as in SGD."""
    for name, parameter in model.named_parameters():
        away = parameter - targets.get(name, 0)
        if decoupled:
            parameter -= LR * DECAY * away
        else:
            parameter.grad += DECAY * away


def largest_difference(make_optimizer, decay=None, clip=None, conditioning=None):
    """Train W under W + C and the folded W + C alike, ten steps; return the largest difference after unfolding.

    ``decay`` is None, or whether weight decay is decoupled; ``clip`` is the largest gradient norm.
    """
    torch.manual_seed(0)
    ours = TwoLayers().double()
    condition_linear(ours, "qkv", conditioning or IdentityCorrection(), ("q", "k", "v"), 3, "[3][heads][d]")
    shifted = copy.deepcopy(ours)
    C = {"qkv.weight": ours.qkv.correction_matrix()}
    fold(shifted)
    optimizers = [
        make_optimizer(ours.parameters(), weight_decay=0.0 if decay is None else DECAY),
        make_optimizer(shifted.parameters(), weight_decay=0.0),
    ]
    averages = [ExponentialMovingAverage(model, momentum=0.1) for model in (ours, shifted)]
    clipped = []
    for _ in range(STEPS):
        x = torch.randn(5, 12, dtype=torch.float64)
        for model, optimizer, average in zip((ours, shifted), optimizers, averages, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            if clip is not None:
                clipped.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item() > clip)
            if model is shifted and decay is not None:
                pull(shifted, C, decay)
            optimizer.step()
            average.update_parameters(model)
    assert clip is None or all(clipped), "the clipping must have acted"
    moved = (ours.qkv.weight - averages[0].module.qkv.weight).abs().max()
    assert moved > 1e-6, "the average must differ from the last weight"
    difference = 0.0
    for a, b in ((ours, shifted), (averages[0].module, averages[1].module)):
        unfold(b)
        pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
        difference = max(difference, *((p - q).abs().max().item() for p, q in pairs))
    return difference


sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=LR)


@pytest.mark.parametrize("conditioning", [None, IdentityCorrection(dict(q=1.0, v=10.0), "head")])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize(("optimizer", "decay"), [(sgd, None), (sgd, False), (adamw, None), (adamw, True)])
def test_training_equals_training_the_shifted_weight(optimizer, decay, clip, conditioning):
    assert largest_difference(optimizer, decay, clip, conditioning) < 1e-12


@pytest.mark.parametrize(
    ("optimizer", "conditioning"),
    [
        # Decay of W + C towards 0 instead of C ends elsewhere.
        (lambda parameters, weight_decay: sgd(parameters, weight_decay=DECAY), None),
        (lambda parameters, weight_decay: adamw(parameters, weight_decay=DECAY), None),
        # Its step is multiplied by the root mean square of the parameter, which C changes.
        (functools.partial(torch.optim.Adafactor, lr=0.01), None),
        # The gradient is s times that of the shifted weight: another learning rate.
        (sgd, IdentityCorrection(1.0, preserve_norm=0.1)),
    ],
)
def test_what_is_another_training(optimizer, conditioning):
    """The test above has teeth, and what the claim leaves out does not hold."""
    assert largest_difference(optimizer, conditioning=conditioning) > 1e-4

"""An orthogonal start of the projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mmspectral import ops
from mmspectral.layers.base import Conditioning, is_finite_number, register_conditioning
from mmspectral.layers.switched_linear import SwitchedLinear
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.precision import at_least_float32


@register_conditioning
class OrthogonalInit(Conditioning):
    """Start each projection at a random (semi-)orthogonal matrix times ``gain``: kappa = 1, then training moves it.

    The draw is ``torch.nn.init.orthogonal_``'s (arXiv 1312.6120), on each
    [D, E] projection by itself. It follows the model's own initialisation,
    whose biases and other projections stay, and precedes checkpoints, which win.
    Nothing but the start differs from the stock model.

    Args:
        gain: Singular value of every projection at the start. A trunc-normal
            D x D matrix of standard deviation 0.02 has the same Frobenius norm
            at gain 0.02 sqrt(D).
        targets: Which of ``"q"``, ``"k"``, ``"v"`` are drawn.

    Raises:
        ValueError: ``gain`` is not positive and finite, or unknown target.
    """

    def __init__(self, gain: float = 1.0, targets: Sequence[str] = ("q", "k", "v")) -> None:
        super().__init__(targets)
        if not (is_finite_number(gain) and gain > 0):
            raise ValueError(f"OrthogonalInit: gain must be positive and finite, got {gain!r}.")
        self.gain = float(gain)

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return OrthogonalLinear(linear, self, layout)

    def settings(self) -> dict:
        return dict(super().settings(), gain=self.gain)


class OrthogonalLinear(SwitchedLinear, nn.Linear):
    """``nn.Linear`` whose targeted projections are drawn orthogonal whenever its weight is drawn.

    Args:
        linear: The projection to replace; its weight is drawn at once.
        conditioning: Settings.
        layout: What the rows of the weight are.
    """

    changes_function = False

    def make_state(self) -> None:
        """Draw the weight that was taken over."""
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the targeted projections, from torch's global generator."""
        if self.weight.is_meta:
            return
        heads = ops.split_projections(self.weight, self.layout, "head")  # a view [P, h, d, E]
        for p in self.targeted:
            start = torch.empty_like(at_least_float32(heads[p].flatten(0, 1)))  # QR needs float32
            nn.init.orthogonal_(start, self.conditioning.gain)
            heads[p].copy_(start.view_as(heads[p]))

    def folded(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` that shares the parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

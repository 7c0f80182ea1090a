"""A linear projection whose effective weight is W + C."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmspectral.ops import ProjectionLayout

if TYPE_CHECKING:
    from mmspectral.layers.corrections import Correction

METADATA_KEY = "conditioning"


class ConditionedLinear(nn.Linear):
    """``nn.Linear`` that computes x (W + C)^T + b; its parameters are W and b.

    Names and shapes in ``state_dict`` are those of ``nn.Linear``. That a weight
    was trained under C is written into the metadata of the state dict (which
    ``torch.save`` keeps), so that a loader can tell it from a stock weight.

    Args:
        in_features: E.
        out_features: P * D.
        correction: How C is made.
        layout: What the rows of the weight are.
        bias: Whether there is a bias.
        device: As in ``nn.Linear``.
        dtype: As in ``nn.Linear``.

    Raises:
        ValueError: The rows do not fit the layout, or the layout not the scope.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        correction: Correction,
        layout: ProjectionLayout,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.correction = correction
        self.layout = layout
        correction.corrected(torch.empty(out_features, in_features, device="meta"), layout)
        self.register_state_dict_post_hook(_write_metadata)

    @classmethod
    def from_linear(cls, linear: nn.Linear, correction: Correction, layout: ProjectionLayout) -> ConditionedLinear:
        """Return a conditioned projection that shares the parameters of ``linear``."""
        conditioned = cls(
            linear.in_features, linear.out_features, correction, layout, linear.bias is not None, device="meta"
        )
        conditioned.weight, conditioned.bias = linear.weight, linear.bias
        return conditioned.train(linear.training)

    def corrected_weight(self) -> Tensor:
        """Return W + C [P * D, E]."""
        return self.correction.corrected(self.weight, self.layout)

    def folded(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` with weight W + C and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.corrected_weight().detach(), requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.correction.linear(x, self.weight, self.bias, self.layout)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, correction={self.correction}, layout={self.layout.as_dict()}"


def _write_metadata(module: ConditionedLinear, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    local_metadata[METADATA_KEY] = dict(module.correction.settings(), layout=module.layout.as_dict())

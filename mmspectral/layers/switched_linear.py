"""What the projections put in by :mod:`mmspectral.layers.switches` have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mmspectral.layers.base import Conditioning
from mmspectral.layers.projection import METADATA_KEY
from mmspectral.ops import ProjectionLayout


class SwitchedLinear(nn.Linear):
    """Projection that takes the place of an ``nn.Linear`` and holds its very parameters.

    ``weight`` and ``bias`` keep their names, so a stock state dict loads with
    ``strict=False`` and misses only the names that a subclass adds. How the
    projection was changed is written into the metadata of the state dict, as
    :class:`mmspectral.layers.ConditionedLinear` does.

    A subclass names ``nn.Linear`` as a second base: mmengine's initialisers for
    ``layer='Linear'`` look at the name of the class and of its direct bases, and
    would silently pass over a grandchild.

    Args:
        linear: The projection to replace.
        conditioning: The settings that replace it.
        layout: What the rows of the weight are.

    Raises:
        ValueError: The rows do not fit the layout.
    """

    changes_function = True  # whether the same weights compute something else in an nn.Linear

    def __init__(self, linear: nn.Linear, conditioning: Conditioning, layout: ProjectionLayout) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.conditioning = conditioning
        self.layout = layout
        self.rows_per_head = layout.rows_per_head(linear.out_features)
        self.targeted = [p for p, role in enumerate(layout.roles) if role in conditioning.targets]
        self.register_state_dict_post_hook(_write_metadata)
        self.make_state()
        self.train(linear.training)

    def make_state(self) -> None:
        """Make what a subclass holds besides weight and bias, in the form of the present weight."""

    def init_weights(self) -> None:
        """Follow a weight that was drawn anew; mmengine's ``BaseModule`` calls its children by this name."""

    def apply(self, fn: Callable[[nn.Module], None]) -> SwitchedLinear:
        """Apply ``fn`` as ``nn.Module`` does; if it changed the weight, :meth:`init_weights` follows.

        mmengine's initialisers go through ``apply``, which also reaches the
        projections whose parents are no ``BaseModule``, such as XCiT's blocks.
        """
        before = self.weight.detach().clone()
        super().apply(fn)
        if _drawn_anew(before, self.weight):
            self.init_weights()
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as ``nn.Module`` does, also on assignment; a weight in place of one on the meta device gets state.

        So a layer can be built on that device and then given the parameters of a stock layer.
        """
        before = self._parameters.get(name)  # none while FullyShardedDataParallel exchanges it
        awaited = name == "weight" and hasattr(self, "targeted") and before is not None
        awaited = awaited and before.is_meta and not param.is_meta
        super().register_parameter(name, param)
        if awaited:
            self.make_state()

    def per_row(self, factors: Tensor) -> Tensor:
        """Spread one factor per projection [P] over the rows of the weight [P * D]."""
        P, h, d = len(self.layout.roles), self.layout.num_heads, self.rows_per_head
        if self.layout.row_order == "[heads][3][d]":
            return factors.view(1, P, 1).expand(h, P, d).flatten()
        return factors.view(P, 1, 1).expand(P, h, d).flatten()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, conditioning={self.conditioning}, layout={self.layout.as_dict()}"


def _drawn_anew(before: Tensor, after: Tensor) -> bool:
    """Whether the values, and not the form, of a weight were changed."""
    same_form = (before.shape, before.dtype, before.device) == (after.shape, after.dtype, after.device)
    return same_form and not after.is_meta and not torch.equal(before, after)


def _write_metadata(module: SwitchedLinear, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    if module.changes_function:
        local_metadata[METADATA_KEY] = dict(module.conditioning.settings(), layout=module.layout.as_dict())

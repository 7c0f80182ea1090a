"""A linear projection whose effective weight is W + C."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspectral.ops import ProjectionLayout

if TYPE_CHECKING:
    from mmspectral.layers.corrections import Correction

METADATA_KEY = "conditioning"


class ConditionedLinear(nn.Linear):
    """``nn.Linear`` that computes x (W + C)^T + b; its parameters are W and b.

    Names and shapes in ``state_dict`` are those of ``nn.Linear``, and
    ``correction`` where C is stored (:class:`mmspectral.layers.DerivedCorrection`
    with an interval). A state dict without it loads, and C is found from the
    loaded W. That a weight was trained under C is written into the metadata of
    the state dict (which ``torch.save`` keeps), so that a loader can tell it
    from a stock weight.

    Args:
        in_features: E.
        out_features: P * D.
        conditioning: How C is made.
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
        conditioning: Correction,
        layout: ProjectionLayout,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.conditioning = conditioning
        self.layout = layout
        conditioning.corrected(torch.empty(out_features, in_features, device="meta"), layout)
        if conditioning.stored:
            self.register_buffer("correction", torch.empty_like(self.weight, requires_grad=False))
            self.has_refresher = False
            self.refresh()
        self.register_state_dict_post_hook(_write_metadata)

    @classmethod
    def from_linear(cls, linear: nn.Linear, conditioning: Correction, layout: ProjectionLayout) -> ConditionedLinear:
        """Return a conditioned projection that shares the parameters of ``linear``."""
        conditioned = cls(
            linear.in_features, linear.out_features, conditioning, layout, linear.bias is not None, device="meta"
        )
        conditioned.weight, conditioned.bias = linear.weight, linear.bias
        return conditioned.train(linear.training)

    def corrected_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W + C [P * D, E], of W cast to ``dtype`` if that is given."""
        weight = self.weight if dtype is None else self.weight.to(dtype)
        if self.conditioning.stored:
            return weight + self.correction.to(weight.dtype)
        return self.conditioning.corrected(weight, self.layout)

    def correction_matrix(self) -> Tensor:
        """Return the C in use [P * D, E]."""
        return self.correction if self.conditioning.stored else self.conditioning.matrix(self.weight, self.layout)

    @torch.no_grad()
    def refresh(self) -> None:
        """Find a stored C again, from the present W; nothing happens where C is not stored.

        A W that is sharded over ranks by ``fully_shard`` is gathered, for which all of them must call.
        """
        if not self.conditioning.stored:
            return
        whole = self.weight.full_tensor() if hasattr(self.weight, "full_tensor") else self.weight
        C = self.conditioning.matrix(whole, self.layout)
        if (self.correction.device, self.correction.dtype) == (self.weight.device, self.weight.dtype):
            self.correction.copy_(C)
        else:
            self.correction = C.to(self.weight.dtype)

    def folded(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` with weight W + C and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.corrected_weight().detach(), requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.conditioning.stored:
            return self.conditioning.linear(x, self.weight, self.bias, self.layout)
        if self.training and not self.has_refresher and torch.is_grad_enabled():
            self.has_refresher = True  # say it once
            warnings.warn(
                f"training with {self.conditioning} but nothing refreshes C: put dict(type='mmspectral."
                "CorrectionRefreshHook') into custom_hooks, or call mmspectral.layers.refresh_corrections(model, "
                "updates) before each update.",
                stacklevel=2,
            )
        return F.linear(x, self.corrected_weight(), self.bias)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as ``nn.Module`` does, also on assignment; a new weight gets its own C."""
        super().register_parameter(name, param)
        if name == "weight" and "correction" in self._buffers:
            self.refresh()

    def apply(self, fn: Callable[[nn.Module], None]) -> ConditionedLinear:
        """Apply ``fn`` as ``nn.Module`` does; if it drew the weight anew, as initialisers do, so is a stored C."""
        before = self.weight.detach().clone() if self.conditioning.stored else None
        super().apply(fn)
        if before is not None and not (self.weight.is_meta or torch.equal(before, self.weight)):
            self.refresh()
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, conditioning={self.conditioning}, layout={self.layout.as_dict()}"

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*arguments)
        trained = local_metadata.get(METADATA_KEY)
        if f"{prefix}weight" in state_dict and trained not in (None, _note(self)):
            # torch raises what is collected here, mmengine logs it.
            error_msgs.append(
                f"{prefix}weight was trained with {trained} but is loaded into a projection with {_note(self)}, which "
                "changes what the model computes. Build the model with the file's `conditioning`, fold the file "
                "(tools/model_converters/fold.py), or load it by mmspectral.checkpoints.load.load_backbone."
            )
        key = f"{prefix}correction"
        if self.conditioning.stored and f"{prefix}weight" in state_dict and key not in state_dict:
            missing_keys[:] = [missing for missing in missing_keys if missing != key]
            self.refresh()


def _write_metadata(module: ConditionedLinear, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    local_metadata[METADATA_KEY] = _note(module)


def _note(module: ConditionedLinear) -> dict:
    return dict(module.conditioning.settings(), layout=module.layout.as_dict())

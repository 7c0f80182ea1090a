"""What every backbone of ours has in common: attention sites, loud loading, its outputs described."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from mmcv.cnn.bricks import DropPath
from mmengine.model.weight_init import PretrainedInit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmspectral.checkpoints.load import load_backbone
from mmspectral.layers import attention_layers, build_conditioning, probe_tokens, replaced_projections, saturation

SATURATED = 0.05  # of maximal entropy


class ConditionedBackbone:
    """Mix-in of the conditioned backbones; put it before mmpretrain's class.

    The class supplies ``scratch_init_cfg``, its initialisation from scratch, and
    ``with_cp``, whether :meth:`run_block` recomputes blocks in the backward pass.
    Under ``init_cfg=dict(type='Pretrained', checkpoint=..., prefix=...)`` weights
    are first drawn from it, then loaded by
    :func:`mmspectral.checkpoints.load.load_backbone`, whose other arguments
    (``trained_with_conditioning``, ``min_matched``) the dict may also hold.
    """

    scratch_init_cfg: dict
    with_cp: bool
    probe_length = 196  # tokens that one attention sees: 224-pixel images in patches of 16

    def init_weights(self) -> None:
        """Initialise from scratch, then load the checkpoint that ``init_cfg`` names, if any."""
        init_cfg = self.init_cfg
        if not (isinstance(init_cfg, dict) and init_cfg.get("type") in ("Pretrained", PretrainedInit)):
            super().init_weights()
            return
        first = not self.is_init
        self.init_cfg = self.scratch_init_cfg
        super().init_weights()
        self.init_cfg = init_cfg
        if first:
            load_backbone(
                self, **{key: value for key, value in init_cfg.items() if key not in ("type", "map_location")}
            )

    @property
    def conditioning(self) -> dict | None:
        """Settings of what changes the projections, or None."""
        for projection in replaced_projections(self).values():
            return projection.conditioning.settings()
        return None

    def run_block(self, block: nn.Module, *inputs: Tensor | int | tuple[int, int]) -> Tensor:
        """Call a block, under ``with_cp`` with activation checkpointing (non-reentrant; mmpretrain's is reentrant)."""
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def warn_if_saturated(self) -> None:
        """Warn when attention starts one-hot; call it at the end of ``__init__``.

        Measures the first conditioned layer of each attention class on probe
        tokens of correlation .5, at the weights it has then (torch's default
        draw); the correction decides.
        """
        conditioned = {name: layer for name, layer in attention_layers(self).items() if replaced_projections(layer)}
        first_of_class = {type(layer): (name, layer) for name, layer in reversed(conditioned.items())}
        for name, layer in first_of_class.values():
            projection = next(iter(replaced_projections(layer).values()))
            if projection.weight.is_meta:
                continue
            tokens = probe_tokens(self.probe_length, projection.in_features, correlation=0.5)
            with torch.no_grad():
                measured = saturation(layer.attention_logits(tokens.to(projection.weight)))
            if measured.relative_entropy < SATURATED:
                warnings.warn(
                    f"{type(self).__name__} with {projection.conditioning}: attention of {name} starts with "
                    f"{100 * measured.relative_entropy:.1f} % of the entropy of uniform attention on tokens of "
                    f"correlation 0.5 (largest logit {measured.largest_logit:.0f}): nearly one-hot, which mostly "
                    "trains badly. Use a smaller scale, targets=('v',), or preserve_norm; "
                    "see the saturation table in the README.",
                    stacklevel=3,
                )


def validate_conditioning(*settings: dict | None) -> None:
    """Raise for a wrong ``conditioning`` dict before anything is built."""
    for cfg in settings:
        build_conditioning(cfg)


def freeze(modules: Iterable[nn.Module]) -> None:
    """Put modules in eval mode and take their parameters out of training."""
    for module in modules:
        module.eval()
        for parameter in module.parameters():
            parameter.requires_grad = False


def resolve_indices(indices: int | Sequence[int], count: int, part: str, detail: str = "") -> list[int]:
    """Return ``out_indices`` as numbers from 0 on.

    Args:
        indices: One or more; negative ones count from the end.
        count: How many blocks or stages there are.
        part: ``"block"`` or ``"stage"``, for the message.
        detail: What the message adds to the count.

    Raises:
        ValueError: None, or one that is out of range.
    """
    indices = [indices] if isinstance(indices, int) else list(indices)
    if not indices or any(not -count <= index < count for index in indices):
        raise ValueError(
            f"out_indices {indices} must be at least one {part} of [{-count}, {count}): "
            f"there are {count} {part}s{detail}."
        )
    return [index % count for index in indices]


def rates_to_float(model: nn.Module) -> None:
    """Take the rates of dropout and drop path out of NumPy: ``torch.compile(fullgraph=True)`` refuses its scalars."""
    for module in model.modules():
        if isinstance(module, DropPath):
            module.drop_prob = float(module.drop_prob)
        elif isinstance(module, nn.Dropout):
            module.p = float(module.p)

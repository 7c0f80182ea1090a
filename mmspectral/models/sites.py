"""What every backbone of ours has in common: attention sites, loud loading, its outputs described."""

import warnings
from collections.abc import Iterable

import torch
from mmengine.model.weight_init import PretrainedInit
from torch import nn

from mmspectral.layers import attention_layers, build_conditioning, probe_tokens, replaced_projections, saturation
from mmspectral.models.checkpoints import load_backbone

SATURATED = 0.05  # of maximal entropy


class ConditionedBackbone:
    """Mix-in of the conditioned backbones; put it before mmpretrain's class.

    The class supplies ``scratch_init_cfg``, its initialisation from scratch.
    Under ``init_cfg=dict(type='Pretrained', checkpoint=..., prefix=...)`` weights
    are first drawn from it, then loaded by
    :func:`mmspectral.models.checkpoints.load_backbone`, whose other arguments
    (``trained_with_conditioning``, ``min_matched``) the dict may also hold.
    """

    scratch_init_cfg: dict
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

"""What every backbone of ours has in common: attention sites, loud loading, its outputs described."""

from collections.abc import Iterable

from mmengine.model.weight_init import PretrainedInit
from torch import nn

from mmspectral.layers import build_correction, conditioned_projections
from mmspectral.models.checkpoints import load_backbone


class ConditionedBackbone:
    """Mix-in of the conditioned backbones; put it before mmpretrain's class.

    The class supplies ``scratch_init_cfg``, its initialisation from scratch.
    Under ``init_cfg=dict(type='Pretrained', checkpoint=..., prefix=...)`` weights
    are first drawn from it, then loaded by
    :func:`mmspectral.models.checkpoints.load_backbone`, whose other arguments
    (``trained_with_conditioning``, ``min_matched``) the dict may also hold.
    """

    scratch_init_cfg: dict

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
        """Settings of the correction in use, or None."""
        for projection in conditioned_projections(self).values():
            return projection.correction.settings()
        return None


def validate_conditioning(*settings: dict | None) -> None:
    """Raise for a wrong ``conditioning`` dict before anything is built."""
    for cfg in settings:
        build_correction(cfg)


def freeze(modules: Iterable[nn.Module]) -> None:
    """Put modules in eval mode and take their parameters out of training."""
    for module in modules:
        module.eval()
        for parameter in module.parameters():
            parameter.requires_grad = False

"""Floor 2: ``nn.Module``s and what acts on them; needs torch and no OpenMMLab."""

from mmspectral.layers.conditioning import Sites, condition_linear, conditioned_projections, fold, unfold
from mmspectral.layers.corrections import Correction, IdentityCorrection, build_correction, register_correction
from mmspectral.layers.projections import METADATA_KEY, ConditionedLinear

__all__ = [
    "METADATA_KEY",
    "ConditionedLinear",
    "Correction",
    "IdentityCorrection",
    "Sites",
    "build_correction",
    "condition_linear",
    "conditioned_projections",
    "fold",
    "register_correction",
    "unfold",
]

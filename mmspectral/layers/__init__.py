"""Floor 2: ``nn.Module``s and what acts on them; needs torch and no OpenMMLab."""

from mmspectral.layers.base import Conditioning, build_conditioning, register_conditioning
from mmspectral.layers.conditioning import Sites, condition_linear, conditioned_projections, fold, unfold
from mmspectral.layers.corrections import Correction, IdentityCorrection
from mmspectral.layers.projections import METADATA_KEY, ConditionedLinear
from mmspectral.layers.saturation import Saturation, attention_layers, probe_tokens, saturation

__all__ = [
    "METADATA_KEY",
    "ConditionedLinear",
    "Conditioning",
    "Correction",
    "IdentityCorrection",
    "Saturation",
    "Sites",
    "attention_layers",
    "build_conditioning",
    "condition_linear",
    "conditioned_projections",
    "fold",
    "probe_tokens",
    "register_conditioning",
    "saturation",
    "unfold",
]

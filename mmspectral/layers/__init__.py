"""Floor 2: ``nn.Module``s and what acts on them; needs torch and no OpenMMLab."""

from mmspectral.layers.base import Conditioning, build_conditioning, register_conditioning
from mmspectral.layers.corrections import Correction, IdentityCorrection
from mmspectral.layers.dark import DarkAttention
from mmspectral.layers.derived import DerivedCorrection, PolarCorrection, SVDCorrection
from mmspectral.layers.kernels import build_kernel
from mmspectral.layers.projection import METADATA_KEY, ConditionedLinear
from mmspectral.layers.random_feature_kernel import RandomFeatureKernel, share_geometry
from mmspectral.layers.saturation import Saturation, attention_layers, probe_tokens, saturation
from mmspectral.layers.surgery import (
    Sites,
    condition_linear,
    conditioned_projections,
    fold,
    folded_state_dict,
    refresh_corrections,
    replaced_projections,
    stored_corrections,
    unfold,
)
from mmspectral.layers.switches import OrthogonalInit, QKNorm, SigmaReparam, SpectralNorm, SwitchedLinear

__all__ = [
    "METADATA_KEY",
    "ConditionedLinear",
    "Conditioning",
    "Correction",
    "DarkAttention",
    "DerivedCorrection",
    "IdentityCorrection",
    "OrthogonalInit",
    "PolarCorrection",
    "QKNorm",
    "RandomFeatureKernel",
    "SVDCorrection",
    "Saturation",
    "SigmaReparam",
    "Sites",
    "SpectralNorm",
    "SwitchedLinear",
    "attention_layers",
    "build_conditioning",
    "build_kernel",
    "condition_linear",
    "conditioned_projections",
    "fold",
    "folded_state_dict",
    "probe_tokens",
    "refresh_corrections",
    "register_conditioning",
    "replaced_projections",
    "saturation",
    "share_geometry",
    "stored_corrections",
    "unfold",
]

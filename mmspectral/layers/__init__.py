"""Floor 2: ``nn.Module``s and what acts on them; needs torch and no OpenMMLab."""

from mmspectral.layers.alternatives import OrthogonalInit, QKNorm, SigmaReparam, SpectralNorm
from mmspectral.layers.corrections import (
    ConditionedLinear,
    Correction,
    DerivedCorrection,
    IdentityCorrection,
    PolarCorrection,
    SVDCorrection,
)
from mmspectral.layers.dark import DarkAttention
from mmspectral.layers.kernels import RandomFeatureKernel, build_kernel, feature_kernels, share_geometry
from mmspectral.layers.packed_attention import ConditionedMultiheadAttention, weight_layouts
from mmspectral.layers.projection import (
    METADATA_KEY,
    Conditioning,
    Projection,
    build_conditioning,
    changed_function,
    register_conditioning,
)
from mmspectral.layers.saturation import Saturation, attention_layers, probe_tokens, saturation
from mmspectral.layers.sites import Site, find_sites
from mmspectral.layers.surgery import (
    condition,
    condition_linear,
    conditioned_projections,
    corrected_parameters,
    fold,
    refresh_corrections,
    replaced_projections,
    sites,
    stored_corrections,
    unfold,
    unfolded_weight,
    warn_of_low_precision,
)

__all__ = [
    "METADATA_KEY",
    "ConditionedLinear",
    "ConditionedMultiheadAttention",
    "Conditioning",
    "Correction",
    "DarkAttention",
    "DerivedCorrection",
    "IdentityCorrection",
    "OrthogonalInit",
    "PolarCorrection",
    "Projection",
    "QKNorm",
    "RandomFeatureKernel",
    "SVDCorrection",
    "Saturation",
    "SigmaReparam",
    "Site",
    "SpectralNorm",
    "attention_layers",
    "build_conditioning",
    "build_kernel",
    "changed_function",
    "condition",
    "condition_linear",
    "conditioned_projections",
    "corrected_parameters",
    "feature_kernels",
    "find_sites",
    "fold",
    "probe_tokens",
    "refresh_corrections",
    "register_conditioning",
    "replaced_projections",
    "saturation",
    "share_geometry",
    "sites",
    "stored_corrections",
    "unfold",
    "unfolded_weight",
    "warn_of_low_precision",
    "weight_layouts",
]

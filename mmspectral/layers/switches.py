"""What practitioners compare spectral conditioning with: one config line each, on the same sites.

Importing this module makes them known to ``conditioning=dict(type=...)``.
``None`` leaves the projections alone.
"""

from mmspectral.layers.orthogonal_init import OrthogonalInit, OrthogonalLinear
from mmspectral.layers.qk_norm import QKNorm, QKNormLinear
from mmspectral.layers.spectral_norm import SigmaReparam, SigmaReparamLinear, SpectralNorm, SpectralNormLinear
from mmspectral.layers.switched_linear import SwitchedLinear

__all__ = [
    "OrthogonalInit",
    "OrthogonalLinear",
    "QKNorm",
    "QKNormLinear",
    "SigmaReparam",
    "SigmaReparamLinear",
    "SpectralNorm",
    "SpectralNormLinear",
    "SwitchedLinear",
]

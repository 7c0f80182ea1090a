"""Attention layers, drop-in for mmpretrain's: same forward, same parameter names."""

from mmspectral.models.attention.channel import SpectralChannelAttention
from mmspectral.models.attention.dark import DarkMultiheadAttention
from mmspectral.models.attention.dot_product import SpectralMultiheadAttention
from mmspectral.models.attention.window import SpectralWindowMSA
from mmspectral.models.attention.xca import SpectralXCA

__all__ = [
    "DarkMultiheadAttention",
    "SpectralChannelAttention",
    "SpectralMultiheadAttention",
    "SpectralWindowMSA",
    "SpectralXCA",
]

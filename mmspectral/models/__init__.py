"""Floor 3: backbones, necks and attention layers registered under scope ``mmspectral``."""

from mmspectral.models.attention.channel import SpectralChannelAttention
from mmspectral.models.attention.dark import DarkMultiheadAttention
from mmspectral.models.attention.dot_product import SpectralMultiheadAttention
from mmspectral.models.attention.window import SpectralWindowMSA
from mmspectral.models.attention.xca import SpectralXCA
from mmspectral.models.backbones import (
    DarkDeiT,
    DarkSwin,
    DarkViT,
    SpectralDaViT,
    SpectralDeiT,
    SpectralSwin,
    SpectralViT,
    SpectralXCiT,
)
from mmspectral.models.conditioned_model import conditioned_model
from mmspectral.models.necks import Feature2Pyramid

__all__ = [
    "DarkDeiT",
    "DarkMultiheadAttention",
    "DarkSwin",
    "DarkViT",
    "Feature2Pyramid",
    "SpectralChannelAttention",
    "SpectralDaViT",
    "SpectralDeiT",
    "SpectralMultiheadAttention",
    "SpectralSwin",
    "SpectralViT",
    "SpectralWindowMSA",
    "SpectralXCA",
    "SpectralXCiT",
    "conditioned_model",
]

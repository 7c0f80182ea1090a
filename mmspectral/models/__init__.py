"""Floor 3: backbones, necks and attention layers registered under scope ``mmspectral``."""

from mmspectral.models.attention import SpectralXCA
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
from mmspectral.models.channel_attention import SpectralChannelAttention
from mmspectral.models.conditioned_model import conditioned_model
from mmspectral.models.dark_attention import DarkMultiheadAttention
from mmspectral.models.multihead_attention import SpectralMultiheadAttention
from mmspectral.models.necks import Feature2Pyramid
from mmspectral.models.window_attention import SpectralWindowMSA

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

"""Floor 3: backbones, necks and attention layers registered under scope ``mmspectral``."""

from mmspectral.models.attention import SpectralXCA
from mmspectral.models.backbones import SpectralXCiT
from mmspectral.models.necks import Feature2Pyramid

__all__ = ["Feature2Pyramid", "SpectralXCA", "SpectralXCiT"]

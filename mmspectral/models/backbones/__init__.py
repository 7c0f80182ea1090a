from mmspectral.models.backbones.dark import DarkDeiT, DarkSwin, DarkViT
from mmspectral.models.backbones.davit import SpectralDaViT
from mmspectral.models.backbones.deit import SpectralDeiT
from mmspectral.models.backbones.swin import SpectralSwin
from mmspectral.models.backbones.vit import SpectralViT
from mmspectral.models.backbones.xcit import SpectralXCiT

__all__ = [
    "DarkDeiT",
    "DarkSwin",
    "DarkViT",
    "SpectralDaViT",
    "SpectralDeiT",
    "SpectralSwin",
    "SpectralViT",
    "SpectralXCiT",
]

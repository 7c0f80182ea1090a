from mmspectral.models.backbones.xcit import SpectralXCiT

__all__ = ["SpectralXCiT"]

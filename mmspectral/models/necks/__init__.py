from mmspectral.models.necks.feature2pyramid import Feature2Pyramid

__all__ = ["Feature2Pyramid"]

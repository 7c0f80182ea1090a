"""DeiT with spectral conditioning, with and without distillation."""

import torch
from mmengine.model.weight_init import trunc_normal_
from mmpretrain.models.backbones import DistilledVisionTransformer
from torch import Tensor, nn

from mmspectral.arguments import FLAG, checked
from mmspectral.models.backbones.vit import SpectralViT
from mmspectral.registry import MODELS


@MODELS.register_module()
class SpectralDeiT(SpectralViT):
    """DeiT (arXiv 2012.12877) with conditioned q, k and v projections.

    With ``distillation=False`` it is mmpretrain's VisionTransformer at a DeiT
    size, with ``distillation=True`` its DistilledVisionTransformer; parameter
    names and, with ``conditioning=None``, outputs are the same. One class, as
    mmpretrain's distilled one cannot be built without its token, and a
    checkpoint of either form loads into the other: a distillation token that
    is not wanted is dropped, with its row of the position embedding; one that
    the file lacks stays as it was initialised (``strict=True`` reports it missing).

    Args:
        arch: As in :class:`SpectralViT`.
        distillation: Whether there is a distillation token. ``out_type='cls_token'``
            then gives pairs (class token, distillation token), as mmpretrain's
            ``DeiTClsHead`` takes them.
        **kwargs: As in :class:`SpectralViT`.

    Raises:
        ValueError: ``distillation`` without a class token, or as in :class:`SpectralViT`.
    """

    @checked(distillation=FLAG)
    def __init__(self, arch: str | dict = "deit-base", *, distillation: bool = False, **kwargs) -> None:
        if distillation and not kwargs.get("with_cls_token", True):
            raise ValueError("distillation=True needs the class token; remove with_cls_token=False.")
        if distillation and kwargs.get("pre_norm"):
            raise ValueError("distillation=True goes without pre_norm=True, which mmpretrain's forward would skip.")
        self.distillation = distillation
        self.num_extra_tokens = 2 if distillation else 1
        super().__init__(arch, **kwargs)
        if distillation:
            self.dist_token = nn.Parameter(trunc_normal_(torch.zeros(1, 1, self.embed_dims), std=0.02))
            self._freeze_stages()

    def forward(self, x: Tensor) -> tuple:
        """Map images [B, 3, H, W] to one output per index; maps are [B, D, ceil(H / p), ceil(W / p)]."""
        return DistilledVisionTransformer.forward(self, x) if self.distillation else super().forward(x)

    def _format_output(self, x: Tensor, hw: tuple[int, int]) -> Tensor | tuple[Tensor, Tensor]:
        if self.distillation and self.out_type == "cls_token":
            return x[:, 0], x[:, 1]
        return super()._format_output(x, hw)

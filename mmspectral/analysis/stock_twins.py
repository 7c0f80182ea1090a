"""Conditioned backbones of the five families, and mmpretrain's own with the same weights."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from mmpretrain.models.backbones import DaViT, DistilledVisionTransformer, SwinTransformer, VisionTransformer, XCiT
from torch import nn

from mmspectral.layers import fold
from mmspectral.models import SpectralDaViT, SpectralDeiT, SpectralSwin, SpectralViT, SpectralXCiT
from mmspectral.models.backbones.xcit import ARCHITECTURES


class Family(NamedTuple):
    """How a family is built, here and by mmpretrain: classes, size of the paper, arguments of both and of ours alone.

    ``takes`` names which of ``img_size`` and ``patch_size`` both take, ``sites`` what takes a conditioning.
    """

    ours: type[nn.Module]
    stock: type[nn.Module]
    arch: str
    shared: Mapping
    own: Mapping
    takes: tuple[str, ...]
    sites: tuple[str, ...] = ("conditioning",)


_MAPS = dict(out_type="featmap", drop_path_rate=0.0)
_PYRAMID = dict(out_indices=(0, 1, 2, 3), pad_small_map=True, drop_path_rate=0.0)
_PLAIN = ("img_size", "patch_size")

FAMILIES = {
    "xcit": Family(SpectralXCiT, XCiT, "small-12", _MAPS, {}, ("patch_size",)),
    "swin": Family(SpectralSwin, SwinTransformer, "tiny", _PYRAMID, {}, ()),
    "vit": Family(SpectralViT, VisionTransformer, "deit-small", _MAPS, {}, _PLAIN),
    "deit": Family(SpectralDeiT, DistilledVisionTransformer, "deit-small", _MAPS, dict(distillation=True), _PLAIN),
    "davit": Family(SpectralDaViT, DaViT, "tiny", _PYRAMID, {}, (), ("conditioning", "channel_conditioning")),
}


@dataclass(frozen=True)
class DenseBackbone:
    """A backbone that returns maps, without drop path, in the forms that are compared.

    Args:
        family: Key of ``FAMILIES``. DeiT has its distillation token.
        arch: Its size; None is the small one of the paper.
        image_size: (H, W) that position embeddings are made for.
        patch_size: Of XCiT, ViT and DeiT.
    """

    family: str
    arch: str | dict | None = None
    image_size: tuple[int, int] = (224, 224)
    patch_size: int = 16

    @property
    def size(self) -> str | dict:
        """Name of the architecture, or its settings."""
        return self._family.arch if self.arch is None else self.arch

    def conditioned(self, conditioning: dict | None) -> nn.Module:
        """Build ours, every attention conditioned (in DaViT that of windows and that of channels).

        Weights are drawn by the constructors from torch's global generator. The
        warning of attention that starts one-hot is left out: this is not for training.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* of the entropy of uniform attention ")
            sites = dict.fromkeys(self._family.sites, conditioning)
            return self._family.ours(self.size, **self._shared(), **self._family.own, **sites)

    def stock(self, ours: nn.Module | None = None) -> nn.Module:
        """Build mmpretrain's own, with the weights W of what :meth:`conditioned` returned if that is given.

        Raises:
            RuntimeError: The weights do not fit, one for one.
        """
        settings = dict(arch=self.size) | self._shared()
        if self._family.stock is XCiT:  # it knows no names of sizes, no form without class token, and other outputs
            with torch.device("meta"):
                out_indices = self.conditioned(None).out_indices
            settings = dict(self.size if isinstance(self.size, dict) else ARCHITECTURES[self.size])
            settings |= dict(self._shared(), out_indices=out_indices, cls_attn_layers=0, final_norm=False)
        stock = self._family.stock(**settings)
        unused = {"cls_token": stock.cls_token} if self._family.stock is XCiT else {}
        for parameter in unused.values():
            parameter.requires_grad_(False)
        if ours is not None:
            stock.load_state_dict({**ours.state_dict(), **unused}, strict=True)
        return stock

    def folded(self, ours: nn.Module) -> nn.Module:
        """Fold ours, in place, and build mmpretrain's own with its weights W + C: the same function."""
        fold(ours)
        return self.stock(ours)

    @property
    def _family(self) -> Family:
        return FAMILIES[self.family]

    def _shared(self) -> dict:
        sizes = dict(img_size=tuple(self.image_size), patch_size=self.patch_size)
        return dict(self._family.shared, **{name: sizes[name] for name in self._family.takes})

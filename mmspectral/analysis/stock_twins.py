"""Conditioned backbones of the five families in dense form, and mmpretrain's own with the same weights."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mmpretrain.models.backbones import DaViT, DistilledVisionTransformer, SwinTransformer, VisionTransformer, XCiT
from torch import nn

from mmspectral.layers import fold
from mmspectral.models import SpectralDaViT, SpectralDeiT, SpectralSwin, SpectralViT, SpectralXCiT
from mmspectral.models.backbones.xcit import ARCHITECTURES


@dataclass(frozen=True)
class Family:
    """How a family is built, here and by mmpretrain.

    Args:
        ours: Backbone of this package.
        stock: mmpretrain's class.
        arch: Small size of the paper.
        shared: Arguments of both.
        takes: Which of ``img_size`` and ``patch_size`` both take.
        own: Arguments of ours alone.
        sites: Arguments of ours that take a conditioning.
    """

    ours: type[nn.Module]
    stock: type[nn.Module]
    arch: str
    shared: Mapping = MappingProxyType({})
    takes: tuple[str, ...] = ()
    own: Mapping = field(default_factory=dict)
    sites: tuple[str, ...] = ("conditioning",)


_MAPS = dict(out_type="featmap", drop_path_rate=0.0)
_PYRAMID = dict(out_indices=(0, 1, 2, 3), pad_small_map=True, drop_path_rate=0.0)

FAMILIES = {
    "xcit": Family(SpectralXCiT, XCiT, "small-12", _MAPS, ("patch_size",)),
    "swin": Family(SpectralSwin, SwinTransformer, "tiny", _PYRAMID),
    "vit": Family(SpectralViT, VisionTransformer, "deit-small", _MAPS, ("img_size", "patch_size")),
    "deit": Family(
        SpectralDeiT,
        DistilledVisionTransformer,
        "deit-small",
        _MAPS,
        ("img_size", "patch_size"),
        dict(distillation=True),
    ),
    "davit": Family(SpectralDaViT, DaViT, "tiny", _PYRAMID, sites=("conditioning", "channel_conditioning")),
}


def conditioned_backbone(
    family: str,
    conditioning: dict | None,
    arch: str | dict | None = None,
    image_size: tuple[int, int] = (224, 224),
    patch_size: int = 16,
) -> nn.Module:
    """Build a backbone that returns maps, without drop path, with every attention of its maps conditioned.

    Weights are those of the constructors, from torch's global generator. DeiT
    has its distillation token. DaViT is conditioned in window and channel attention.

    Args:
        family: Key of ``FAMILIES``.
        conditioning: As the backbones take it. They warn of attention that
            starts one-hot; not here, where nothing is trained.
        arch: Its size; None is the small one of the paper.
        image_size: (H, W) that position embeddings are made for.
        patch_size: Of XCiT, ViT and DeiT.
    """
    kind = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* of the entropy of uniform attention ")
        return kind.ours(
            kind.arch if arch is None else arch,
            **_shared(kind, image_size, patch_size),
            **kind.own,
            **dict.fromkeys(kind.sites, conditioning),
        )


def stock_twin(
    family: str,
    ours: nn.Module,
    arch: str | dict | None = None,
    image_size: tuple[int, int] = (224, 224),
    patch_size: int = 16,
) -> nn.Module:
    """Return mmpretrain's own backbone with the weights W of ``ours``.

    Args:
        family: Key of ``FAMILIES``.
        ours: Built by :func:`conditioned_backbone` with the arguments that follow.
        arch: See there.
        image_size: See there.
        patch_size: See there.

    Raises:
        RuntimeError: The weights do not fit, one for one.
    """
    kind = FAMILIES[family]
    arch = kind.arch if arch is None else arch
    settings = dict(arch=arch)
    if kind.stock is XCiT:  # it knows no names of sizes
        settings = dict(arch if isinstance(arch, dict) else ARCHITECTURES[arch], cls_attn_layers=0, final_norm=False)
    shared = _shared(kind, image_size, patch_size)
    stock = kind.stock(**{**settings, **shared, "out_indices": ours.out_indices})
    weights = ours.state_dict()
    if kind.stock is XCiT:
        stock.cls_token.requires_grad_(False)  # maps do not use it, and ours does not have it
        weights["cls_token"] = stock.cls_token.detach()
    stock.load_state_dict(weights, strict=True)
    return stock


def folded_twin(
    family: str,
    ours: nn.Module,
    arch: str | dict | None = None,
    image_size: tuple[int, int] = (224, 224),
    patch_size: int = 16,
) -> nn.Module:
    """Fold ``ours``, in place, and return mmpretrain's own backbone with its weights W + C: the same function.

    Args: those of :func:`stock_twin`.
    """
    fold(ours)
    return stock_twin(family, ours, arch, image_size, patch_size)


def _shared(kind: Family, image_size: tuple[int, int], patch_size: int) -> dict:
    sizes = dict(img_size=tuple(image_size), patch_size=patch_size)
    return dict(kind.shared, **{name: sizes[name] for name in kind.takes})

"""Spectral conditioning and data-aware random-feature attention for OpenMMLab.

Importing this package is cheap. It does two things: it offers torchvision's
operators to mmcv where mmcv's compiled extension is absent
(:mod:`mmspectral.compat.mmcv_ops`), and it tells mmengine where the configs
behind ``mmspectral::`` lie. Backbones, layers and hooks are imported when a
config names them, or by ``import mmspectral.layers`` and its siblings;
:func:`condition`, :func:`fold`, :func:`unfold` and :func:`sites`, which act on
any model, when they are first used.
"""

from typing import TYPE_CHECKING

from mmspectral.compat.mmcv_ops import install as _install_mmcv_ops
from mmspectral.configs_path import config_path
from mmspectral.configs_path import register_with_mmengine as _register_with_mmengine
from mmspectral.version import __version__

if TYPE_CHECKING:
    from mmspectral.layers import condition, fold, sites, unfold

_install_mmcv_ops()
_register_with_mmengine()

__all__ = ["__version__", "condition", "config_path", "fold", "sites", "unfold"]


def __getattr__(name: str) -> object:
    if name in ("condition", "fold", "sites", "unfold"):
        from mmspectral import layers  # torch, which a light import leaves out

        return getattr(layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

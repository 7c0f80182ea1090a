"""Spectral conditioning and data-aware random-feature attention for OpenMMLab.

Importing this package is cheap. It does two things: it lets mmcv and mmpretrain
import on a current torch and beside a current transformers
(:mod:`mmspectral.compat`), and it tells mmengine where the configs
behind ``mmspectral::`` lie. Backbones, layers and hooks are imported when a
config names them, or by ``import mmspectral.layers`` and its siblings;
:func:`condition`, :func:`fold`, :func:`unfold` and :func:`sites`, which act on
any model, when they are first used.
"""

from typing import TYPE_CHECKING

from mmspectral.compat import install as _install_finders
from mmspectral.configs_path import config_path
from mmspectral.configs_path import register_with_mmengine as _register_with_mmengine
from mmspectral.version import __version__

if TYPE_CHECKING:
    from mmspectral.layers import condition, fold, sites, unfold

_install_finders()
_register_with_mmengine()

__all__ = ["__version__", "condition", "config_path", "fold", "sites", "unfold"]


def __getattr__(name: str) -> object:
    if name in ("condition", "fold", "sites", "unfold"):
        from mmspectral import layers  # torch, which a light import leaves out

        return getattr(layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

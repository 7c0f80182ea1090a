"""What makes the host libraries work on a current torch and beside current packages.

The original OpenMMLab packages need all of it: mmengine asks pkg_resources where packages lie and mmdet refuses newer
releases of mmcv (both settled by the versions in :data:`mmspectral.compat.environment.FAMILIES`), mmcv has no compiled
operators for a current torch (:mod:`mmspectral.compat.mmcv_ops`), mmengine cannot read the checkpoints that it writes
(:mod:`mmspectral.compat.checkpoints`), and mmpretrain does not import beside transformers 5
(:mod:`mmspectral.compat.multimodal`). It also looks for the configs of an editable install in site-packages
(:func:`mmspectral.configs_path.register_with_mmengine`).
"""

from mmspectral.compat import mmcv_ops, multimodal
from mmspectral.compat.mmcv_ops import mmcv_ops_backend

__all__ = ["install", "mmcv_ops_backend", "use_safe_loading"]


def install() -> None:
    """Put the finders that mmcv and mmpretrain need on ``sys.meta_path``, once; imports neither."""
    mmcv_ops.install()
    multimodal.install()


def __getattr__(name: str) -> object:
    if name == "use_safe_loading":
        from mmspectral.compat.checkpoints import use_safe_loading  # torch, which a light import leaves out

        return use_safe_loading
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

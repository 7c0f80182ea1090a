"""What makes the host libraries work on a current torch: operators, checkpoints, a look at the environment.

The original OpenMMLab packages need all of it: mmengine asks pkg_resources where packages lie and mmdet refuses newer
releases of mmcv (both settled by the versions in :data:`mmspectral.compat.environment.FAMILIES`), mmcv has no compiled
operators for a current torch (:mod:`mmspectral.compat.mmcv_ops`), and mmengine cannot read the checkpoints that it
writes (:mod:`mmspectral.compat.checkpoints`). It also looks for the configs of an editable install in site-packages
(:func:`mmspectral.configs_path.register_with_mmengine`).
"""

from mmspectral.compat.mmcv_ops import mmcv_ops_backend

__all__ = ["mmcv_ops_backend"]

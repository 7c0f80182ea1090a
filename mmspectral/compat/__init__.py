"""What makes the host libraries work on a current torch: operators, checkpoints, a look at the environment."""

from mmspectral.compat.mmcv_ops import mmcv_ops_backend

__all__ = ["mmcv_ops_backend"]

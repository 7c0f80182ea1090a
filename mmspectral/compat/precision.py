"""The precision in which the stand-ins for mmcv's operators compute."""

from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, any other as it is."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor

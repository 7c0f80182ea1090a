"""Islands of full precision within half-precision models."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, any other as it is."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in which products keep the dtype of their factors."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()  # on the meta device


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear map of ``x`` computes: that of autocast where it is on, else that of ``x``."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype

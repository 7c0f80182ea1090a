"""Normalisation settings that work on every device."""

import logging

import torch
from mmengine.logging import print_log


def usable_norm_cfg(norm_cfg: dict | None) -> dict | None:
    """Return ``norm_cfg`` with SyncBN replaced by BN where there is no CUDA.

    ``torch.nn.SyncBatchNorm`` refuses CPU tensors as soon as a process group
    exists. Names and shapes of parameters are the same for both.
    """
    if norm_cfg is None or norm_cfg.get("type") not in ("SyncBN", "MMSyncBN") or torch.cuda.is_available():
        return norm_cfg
    print_log(
        f"{norm_cfg['type']} needs CUDA: using BN, with statistics of each process alone.", "current", logging.INFO
    )
    return dict(norm_cfg, type="BN")

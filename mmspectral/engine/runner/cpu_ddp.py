"""Data-parallel runs on machines without an accelerator.

mmengine's launcher calls ``torch.cuda.set_device`` whatever the backend, and
wraps the model for the device ``LOCAL_RANK``. So the process group is made
here, with gloo, before the Runner, which then leaves it alone.
"""

import os
import subprocess
from datetime import timedelta

import torch.distributed as dist
from mmengine.config import Config, ConfigDict

from mmspectral.errors import UsageError

# Where each launcher says what torch reads as RANK, WORLD_SIZE and LOCAL_RANK; torchrun sets these itself.
_LAUNCHER_VARIABLES = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def init_cpu_process_group(launcher: str, dist_cfg: dict | None = None) -> None:
    """Join this process to a gloo group of CPU processes.

    Args:
        launcher: ``"pytorch"``, ``"slurm"`` or ``"mpi"`` (Open MPI).
        dist_cfg: The config's ``env_cfg.dist_cfg``; its ``timeout`` (seconds)
            is used, its backend is not.

    Raises:
        UsageError: The launcher's environment variables are missing.
    """
    variables = _LAUNCHER_VARIABLES[launcher]
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise UsageError(
            f"--launcher {launcher} needs the environment of that launcher, but {', '.join(missing)} is not set; "
            "start with tools/dist_train.sh or tools/slurm_train.sh, or leave --launcher out for one process."
        )
    for name, variable in zip(_LAUNCHER_VARIABLES["pytorch"], variables, strict=True):
        os.environ[name] = os.environ[variable]
    if launcher == "slurm" and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_slurm_host()
    os.environ.setdefault("MASTER_PORT", "29500")
    if "MASTER_ADDR" not in os.environ:
        raise UsageError(f"--launcher {launcher} needs MASTER_ADDR, the address of the machine with rank 0.")
    timeout = (dist_cfg or {}).get("timeout")
    dist.init_process_group("gloo", timeout=None if timeout is None else timedelta(seconds=timeout))


def _first_slurm_host() -> str:
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]], capture_output=True, text=True, check=True
    )
    return hosts.stdout.split()[0]


def use_cpu_wrapper(cfg: Config) -> None:
    """Make mmengine wrap the model for the CPU; changes ``cfg`` in place.

    Other settings in ``model_wrapper_cfg`` stay, and so does a wrapper of
    another type.
    """
    wrapper = cfg.get("model_wrapper_cfg") or ConfigDict()
    wrapper.setdefault("type", "MMDistributedDataParallel")
    wrapper.setdefault("broadcast_buffers", False)
    wrapper.setdefault("find_unused_parameters", cfg.get("find_unused_parameters", False))
    # Not a default: mmengine would fill in the number of a GPU.
    wrapper["device_ids"] = None
    cfg.model_wrapper_cfg = wrapper


def replace_sync_norm(cfg: Config) -> bool:
    """Replace SyncBN, which torch has only for accelerators, by BN; changes ``cfg`` in place.

    Returns:
        Whether there was any.
    """
    found = cfg.pop("sync_bn", None) is not None
    pending = [cfg.get("model")]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("type") in ("SyncBN", "MMSyncBN"):
                node["type"] = "BN"
                found = True
            pending.extend(node.values())
        elif isinstance(node, (list, tuple)):
            pending.extend(node)
    return found

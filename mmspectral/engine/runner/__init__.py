"""What the command lines in ``tools/`` do, as functions."""

from mmspectral.arguments import read_config
from mmspectral.engine.runner.launch import launch_run, prepare_cfg_for_device
from mmspectral.errors import UsageError

__all__ = ["UsageError", "launch_run", "prepare_cfg_for_device", "read_config"]

"""Floor 5: hooks, optimizer constructors, and the launching of mmengine's runs."""

from mmspectral.engine.runner.launch import (
    enable_amp,
    enable_lr_scaling,
    launch_run,
    prepare_cfg_for_device,
    runtime_notes,
    set_resume,
)
from mmspectral.engine.runner.testing import predictions_writer, show_predictions, use_test_time_augmentation

__all__ = [
    "enable_amp",
    "enable_lr_scaling",
    "launch_run",
    "predictions_writer",
    "prepare_cfg_for_device",
    "runtime_notes",
    "set_resume",
    "show_predictions",
    "use_test_time_augmentation",
]

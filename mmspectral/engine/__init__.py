"""Floor 5: hooks, optimizer constructors, and the launching of mmengine's runs."""

from mmspectral.engine.config_check import check_config
from mmspectral.engine.launch import launch_run, runtime_notes
from mmspectral.engine.testing import (
    predictions_writer,
    show_predictions,
    use_test_time_augmentation,
)

__all__ = [
    "check_config",
    "launch_run",
    "predictions_writer",
    "runtime_notes",
    "show_predictions",
    "use_test_time_augmentation",
]

"""Hooks of scope ``mmspectral``."""

from mmspectral.engine.hooks.checkpoint_fitting import CheckpointFittingHook
from mmspectral.engine.hooks.checkpoint_hook import CheckpointHook
from mmspectral.engine.hooks.conditioning_hook import ConditioningHook
from mmspectral.engine.hooks.correction_refresh import CorrectionRefreshHook
from mmspectral.engine.hooks.dark_calibration_hook import DarkCalibrationHook
from mmspectral.engine.hooks.exact_resume import (
    DueValidationHook,
    EarlyStoppingHook,
    EpochSeedHook,
    PendingGradientsHook,
    ResumeCheckHook,
)
from mmspectral.engine.hooks.feature_redraw_hook import FeatureRedrawHook
from mmspectral.engine.hooks.non_finite_guard import NonFiniteGuardHook

__all__ = [
    "CheckpointFittingHook",
    "CheckpointHook",
    "ConditioningHook",
    "CorrectionRefreshHook",
    "DarkCalibrationHook",
    "DueValidationHook",
    "EarlyStoppingHook",
    "EpochSeedHook",
    "FeatureRedrawHook",
    "NonFiniteGuardHook",
    "PendingGradientsHook",
    "ResumeCheckHook",
]

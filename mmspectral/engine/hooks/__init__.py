"""Hooks of scope ``mmspectral``."""

from mmspectral.engine.hooks.checkpoint_fitting import CheckpointFittingHook
from mmspectral.engine.hooks.conditioning_hook import ConditioningHook
from mmspectral.engine.hooks.correction_refresh import CorrectionRefreshHook
from mmspectral.engine.hooks.non_finite_guard import NonFiniteGuardHook

__all__ = ["CheckpointFittingHook", "ConditioningHook", "CorrectionRefreshHook", "NonFiniteGuardHook"]

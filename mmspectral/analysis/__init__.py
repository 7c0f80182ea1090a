"""Floor 4: reports about trained models."""

from mmspectral.analysis.condition_numbers import (
    ProjectionCondition,
    plot_projection_conditions,
    projection_conditions,
)

__all__ = ["ProjectionCondition", "plot_projection_conditions", "projection_conditions"]

"""Floor 1: pure functions of tensors, needing only torch; each has a float64 twin in a module ``reference``."""

from mmspectral.ops.conditioning.condition_number import condition_number, condition_number_of, singular_values
from mmspectral.ops.conditioning.identity import add_identity, norm_factors
from mmspectral.ops.conditioning.layout import ROW_ORDERS, SCOPES, ProjectionLayout, require_whole
from mmspectral.ops.conditioning.polar import (
    optimal_quintic,
    polar_correction,
    polar_schedule,
    spectral_norm_bound,
    svd_correction,
)
from mmspectral.ops.cross_covariance import cross_covariance_attention, cross_covariance_logits
from mmspectral.ops.random_features import (
    constant_attention,
    draw_projection,
    fold_features,
    linear_attention,
    sharp_proposal,
    softmax_attention,
    theorem_3_2_proposal,
    uniform_attention,
)

__all__ = [
    "ROW_ORDERS",
    "SCOPES",
    "ProjectionLayout",
    "add_identity",
    "condition_number",
    "condition_number_of",
    "constant_attention",
    "cross_covariance_attention",
    "cross_covariance_logits",
    "draw_projection",
    "fold_features",
    "linear_attention",
    "norm_factors",
    "optimal_quintic",
    "polar_correction",
    "polar_schedule",
    "require_whole",
    "sharp_proposal",
    "singular_values",
    "softmax_attention",
    "spectral_norm_bound",
    "svd_correction",
    "theorem_3_2_proposal",
    "uniform_attention",
]

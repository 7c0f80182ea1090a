"""Positive random features and attention of linear cost over them."""

from mmspectral.ops.random_features.attention import (
    FeatureState,
    attend,
    kernel_logits,
    linear_attention,
    summarise_keys,
)
from mmspectral.ops.random_features.baselines import position_codes, softmax_attention, uniform_attention
from mmspectral.ops.random_features.features import Features, Proposal, draw_projection, fold_features, sharp_proposal

__all__ = [
    "FeatureState",
    "Features",
    "Proposal",
    "attend",
    "draw_projection",
    "fold_features",
    "kernel_logits",
    "linear_attention",
    "position_codes",
    "sharp_proposal",
    "softmax_attention",
    "summarise_keys",
    "uniform_attention",
]

"""Positive random features and attention of linear cost over them."""

from mmspectral.ops.random_features.baselines import (
    constant_attention,
    position_codes,
    softmax_attention,
    uniform_attention,
)
from mmspectral.ops.random_features.features import (
    Features,
    Proposal,
    draw_projection,
    fold_features,
    sharp_proposal,
    theorem_3_2_proposal,
)
from mmspectral.ops.random_features.op import (
    PLAIN_OPERATORS,
    FeatureState,
    attend,
    kernel_logits,
    linear_attention,
    summarise_keys,
)

__all__ = [
    "PLAIN_OPERATORS",
    "FeatureState",
    "Features",
    "Proposal",
    "attend",
    "constant_attention",
    "draw_projection",
    "fold_features",
    "kernel_logits",
    "linear_attention",
    "position_codes",
    "sharp_proposal",
    "softmax_attention",
    "summarise_keys",
    "theorem_3_2_proposal",
    "uniform_attention",
]

"""Condition of the parameter Jacobian of one attention head on probe tokens, beside the bound of Theorem 3.4."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.arguments import check, real, whole
from mmspectral.layers import probe_tokens
from mmspectral.models.attention.xca import SpectralXCA
from mmspectral.ops.conditioning.jacobian import (
    EffectiveCondition,
    JacobianBound,
    attention_jacobian,
    effective_condition,
    jacobian_bound,
)


@dataclass(frozen=True)
class JacobianSettings:
    """Of which layer, on how many probe tokens N and over at most how many dimensions d of its first head.

    The Jacobian has N d rows and 3 D d columns; ``correlation`` is that of two tokens.
    """

    layer: str
    num_tokens: int = 8
    head_dims: int = 16
    correlation: float = 0.5

    def __post_init__(self):
        for name, kind in dict(num_tokens=whole(2), head_dims=whole(1), correlation=real(0, 1)).items():
            check(f"JacobianSettings: {name}", getattr(self, name), kind)


@dataclass(frozen=True)
class HeadJacobian:
    """Condition of J of the dot-product attention of Theorem 3.3 with its bound, over ``dims`` dimensions of the head.

    ``cross_covariance`` is that of the cross-covariance attention that the layer computes; None for other layers.
    """

    dims: int
    condition: EffectiveCondition
    bound: JacobianBound
    cross_covariance: EffectiveCondition | None


@torch.no_grad()
def head_jacobian(
    heads: Mapping[str, Tensor], settings: JacobianSettings, temperature: Tensor | None = None
) -> HeadJacobian:
    """Measure the Jacobian of one head in float64, without bias, mask or position bias, as in the theorem.

    Args:
        heads: Rows [d, D] of one head for each of the roles q, k, v.
        settings: Tokens and dimensions.
        temperature: Of the head if the layer is cross-covariance attention.

    Raises:
        ValueError: A role is missing.
    """
    if set(heads) != {"q", "k", "v"}:
        raise ValueError(
            f"the Jacobian of {settings.layer} needs its q, k and v weights; conditioned are {', '.join(heads)}."
        )
    dims = min(settings.head_dims, len(heads["q"]))
    query, key, value = (heads[role][:dims].double().T for role in "qkv")  # [D, d]
    tokens = probe_tokens(settings.num_tokens, len(query), settings.correlation)[0].double()
    scale = dims**-0.5
    jacobian = torch.cat(attention_jacobian(tokens, query, key, value, scale), dim=1)
    return HeadJacobian(
        dims,
        effective_condition(jacobian),
        jacobian_bound(tokens, query, key, value, scale),
        None if temperature is None else _cross_covariance(tokens, query, key, value, temperature),
    )


def xca_temperature(attention: nn.Module) -> Tensor | None:
    """Return the temperature of the first head of a cross-covariance attention layer, or None for another layer."""
    return attention.temperature[:1].detach().double() if isinstance(attention, SpectralXCA) else None


def _cross_covariance(tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor):
    def head(*weights: Tensor) -> Tensor:
        q, k, v = ((tokens @ weight).mT[None, None] for weight in weights)  # [1, 1, d, N]
        return ops.cross_covariance_attention(q, k, v, temperature).flatten()

    with torch.enable_grad():
        parts = torch.func.jacrev(head, argnums=(0, 1, 2))(query, key, value)
    return effective_condition(torch.cat([part.flatten(1) for part in parts], dim=1))

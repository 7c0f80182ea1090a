"""How attention weighs its values, built from ``kernel=dict(type=...)``.

=============  ==============================================================
``dark``       M learned per head, layer or model (arXiv 2603.04127)
``performer``  M = I (FAVOR+, arXiv 2009.14794)
``temperature``  M = t I, t learned per head: a control
``learned``    the features themselves are trained, M = I
``constant``   random weights that ignore the content: a control
``uniform``    the mean of the values: a control
``softmax``    exact, through torch's scaled_dot_product_attention
=============  ==============================================================

Each is called as ``kernel(q, k, v, mask=None, causal=False)``. Shapes as in
:mod:`mmspectral.layers.random_feature_kernel`.
"""

from functools import partial

import torch
from torch import Tensor, nn

from mmspectral.layers.random_feature_kernel import RandomFeatureKernel
from mmspectral.ops.precision import without_autocast
from mmspectral.ops.random_features.baselines import position_codes, softmax_attention, uniform_attention

PREFIX = "mmspectral."


class SoftmaxKernel(nn.Module):
    """Exact attention.

    Args:
        scale: Factor of the logits; default d^(-1/2).
    """

    def __init__(self, num_heads: int, head_dim: int, *, scale: float | None = None, layer: int = 0) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return softmax_attention(q, k, v, mask, causal, self.scale)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        with without_autocast(q.device):
            return self.scale * q.to(dtype) @ k.to(dtype).mT


class UniformKernel(nn.Module):
    """The mean of the values that may be seen: what attention is without queries and keys."""

    def __init__(self, num_heads: int, head_dim: int, *, scale: float | None = None, layer: int = 0) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return uniform_attention(v, q.shape[2], mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.zeros(*q.shape[:3], k.shape[2], device=q.device)


class ConstantKernel(RandomFeatureKernel):
    """Linear attention between fixed random codes of the positions, N(0, I), whatever the content.

    Args:
        num_heads: h.
        head_dim: d.
        num_features: m; default floor(d ln d).
        scale: Not used: the codes have a size of their own.
        seed: Of draws and codes.
        layer: Index of the layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
        scale: float | None = None,
        seed: int = 0,
        layer: int = 0,
    ) -> None:
        super().__init__(num_heads, head_dim, num_features=num_features, geometry=None, seed=seed, layer=layer)
        self.codes = torch.zeros(0, head_dim)  # no buffer: its length changes, which averaged models do not follow

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k = self._codes(q), self._codes(k)
        return super().forward(q, k, v, mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(self._codes(q), self._codes(k))

    def _codes(self, tokens: Tensor) -> Tensor:
        if len(self.codes) < tokens.shape[2]:
            self.codes = position_codes(tokens.shape[2], self.head_dim, self.seed, self.layer)
        return self.codes[: tokens.shape[2]].to(tokens.device).expand_as(tokens)


_TYPES = dict(
    dark=RandomFeatureKernel,
    performer=partial(RandomFeatureKernel, geometry=None),
    temperature=partial(RandomFeatureKernel, geometry="temperature"),
    learned=partial(RandomFeatureKernel, geometry=None, train_features=True),
    constant=ConstantKernel,
    uniform=UniformKernel,
    softmax=SoftmaxKernel,
)
_ARGUMENTS = dict(
    dark={"num_features", "sharing", "rank", "proposal", "shift", "orthogonal", "seed"},
    performer={"num_features", "proposal", "shift", "orthogonal", "seed"},
    temperature={"num_features", "proposal", "shift", "orthogonal", "seed"},
    learned={"num_features", "shift", "orthogonal", "seed"},
    constant={"num_features", "seed"},
    uniform=set(),
    softmax=set(),
)  # besides what the attention layer gives


def build_kernel(
    cfg: dict | None, num_heads: int, head_dim: int, layer: int = 0, scale: float | None = None
) -> nn.Module:
    """Build what ``kernel=dict(type=...)`` names.

    Args:
        cfg: A dict, or None for exact softmax. ``_scope_``, which config
            inheritance adds, is ignored.
        num_heads: h.
        head_dim: d.
        layer: Index of the layer.
        scale: Factor of the logits; default d^(-1/2).

    Raises:
        TypeError: Not a dict, or an argument that the type does not have.
        KeyError: Unknown type.
        ValueError: A value that the type refuses.
    """
    if cfg is None:
        return SoftmaxKernel(num_heads, head_dim, scale=scale)
    if not isinstance(cfg, dict) or not isinstance(cfg.get("type"), str):
        raise TypeError(f"kernel must be None or a dict with a string 'type', got {cfg!r}.")
    name = cfg["type"].removeprefix(PREFIX)
    if name not in _TYPES:
        raise KeyError(f"unknown kernel type {cfg['type']!r}; known: {', '.join(_TYPES)}.")
    arguments = {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}
    accepted = _ARGUMENTS[name]
    unknown = sorted(set(arguments) - accepted)
    if unknown:
        raise TypeError(
            f"kernel type {name} has no argument {', '.join(map(repr, unknown))}; it takes "
            f"{', '.join(sorted(accepted)) or 'none'}. If a parent config set it for another type, write "
            "`_delete_=True` into the child's kernel dict."
        )
    return _TYPES[name](num_heads, head_dim, scale=scale, layer=layer, **arguments)

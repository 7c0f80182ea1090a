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

Each is called as ``kernel(q, k, v, mask=None, causal=False)``.

Shape legend: B batch, h query heads, H key heads, N queries, L keys, d channels
per head, r rank of M, m features; G is h, or 1 where all heads share M.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx, nn

from mmspectral.arguments import FLAG, checked, one_of, optional, real, whole
from mmspectral.layers.projection import Follows, as_leaf, type_and_arguments
from mmspectral.ops.precision import without_autocast
from mmspectral.ops.random_features import (
    Features,
    Proposal,
    draw_projection,
    fold_features,
    kernel_logits,
    linear_attention,
    position_codes,
    softmax_attention,
    uniform_attention,
)

SHARING = ("head", "layer", "model")
PROPOSALS = ("sharp", "theorem_3_2")
SHIFTS = ("fixed", "learned")
MOST_FEATURES = 1 << 16  # exact attention is cheaper long before


class RandomFeatureKernel(Follows, nn.Module):
    """Attention of linear cost over positive random features (DARK, arXiv 2603.04127, and its like).

    The draws ``w`` exist from construction, a function of (seed, layer,
    redraws) alone, so that all ranks have the same; they are a persistent
    buffer, change only in :meth:`redraw`, in place, and stay in float32 when the
    model is cast. A mean of draws, which an average of buffers leaves, is drawn
    again before use. ``proposal`` and ``shift`` start as if absent (N(0, I), 0)
    until :meth:`set_geometry` fills them, which calibration does.

    Args:
        num_heads: h, or H to give query heads that share keys one M.
        head_dim: d.
        num_features: m; default floor(d ln d).
        geometry: What M is: ``"matrix"`` [G, r, d], learned from I (for r < d from
            random orthogonal rows of length (d / r)^(1/2)); ``"temperature"``, one
            learned factor per head [h]; None, the identity.
        sharing: Whether each ``"head"`` has its M, all heads of a ``"layer"``, or of
            the ``"model"``, see :func:`share_geometry`.
        rank: r; default d.
        proposal: None, or how calibration chooses what is drawn from: ``"sharp"``
            or ``"theorem_3_2"``, see :func:`mmspectral.ops.random_features.sharp_proposal`.
        shift: None, or whether the shift of the keys is ``"fixed"`` or ``"learned"``.
        orthogonal: Whether w has orthogonal blocks.
        train_features: Whether w is a parameter, trained and never redrawn.
        scale: Factor of the logits; default d^(-1/2).
        seed: Of the draws.
        layer: Index of the layer, so that no two have the same draws.

    Raises:
        ValueError: A setting that does not exist or fit.
    """

    _foreign = False  # whether w is not the draw of (seed, layer, redraws)

    @checked(
        num_heads=whole(1),
        head_dim=whole(1),
        num_features=optional(whole(1, MOST_FEATURES)),
        rank=optional(whole(1)),
        orthogonal=FLAG,
        train_features=FLAG,
        scale=optional(real(above=0)),
        seed=whole(),
        layer=whole(0),
        geometry=one_of(None, "matrix", "temperature"),
        sharing=one_of(*SHARING),
        proposal=one_of(None, *PROPOSALS),
        shift=one_of(None, *SHIFTS),
    )
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
        geometry: str | None = "matrix",
        sharing: str = "head",
        rank: int | None = None,
        proposal: str | None = None,
        shift: str | None = None,
        orthogonal: bool = True,
        train_features: bool = False,
        scale: float | None = None,
        seed: int = 0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        m = max(1, int(head_dim * math.log(head_dim))) if num_features is None else num_features
        r = head_dim if rank is None else rank
        if r > head_dim:
            raise ValueError(f"rank must be an integer in [1, {head_dim}], the width of a head, got {rank!r}.")
        self.num_heads, self.head_dim, self.num_features, self.rank = num_heads, head_dim, m, r
        self.geometry, self.sharing, self.proposal, self.scale = geometry, sharing, proposal, scale
        self.orthogonal, self.seed, self.layer = orthogonal, seed, layer
        groups = num_heads if sharing == "head" else 1
        if geometry == "matrix":
            self.M = nn.Parameter(_start(r, head_dim, seed, layer).repeat(groups, 1, 1))
        elif geometry == "temperature":
            self.M = nn.Parameter(torch.ones(num_heads))
        w = draw_projection(m, r, seed, layer, orthogonal=orthogonal)
        if train_features:
            self.w = nn.Parameter(w)
        else:
            self.register_buffer("w", w)
            self.register_buffer("redraws", torch.zeros((), dtype=torch.int64))
        if proposal is not None:
            self.register_buffer("proposal_basis", torch.eye(r).repeat(num_heads, 1, 1))
            self.register_buffer("proposal_variance", torch.ones(num_heads, r))
        if shift == "learned":
            self.shift = nn.Parameter(torch.zeros(num_heads, head_dim))
        else:
            self.register_buffer("shift", None if shift is None else torch.zeros(num_heads, head_dim))
        self.mark()

    @property
    def draws(self) -> bool:
        """Whether :meth:`redraw` does anything: w is drawn, not trained."""
        return "w" in self._buffers

    @torch.no_grad()
    def redraw(self, counter: int) -> None:
        """Draw w for the ``counter``-th time, in place; nothing happens where w is trained."""
        if self.draws:
            self.w.copy_(draw_projection(self.num_features, self.rank, self.seed, self.layer, counter, self.orthogonal))
            self.redraws.fill_(counter)
            self._foreign = False
            self.mark()

    def followed(self) -> list[Tensor]:
        return [self.w, self.redraws] if self.draws and not self._foreign else []

    def refresh(self) -> None:
        """Draw w again as (seed, layer, redraws) say."""
        self.redraw(int(self.redraws))

    @torch.no_grad()
    def set_geometry(
        self, M: Tensor | None = None, proposal: Proposal | None = None, shift: Tensor | None = None
    ) -> None:
        """Write M, what is drawn from and the shift of the keys, in place; None leaves one as it is.

        Args:
            M: [h, r, d] or [1, r, d] ([h] for a temperature).
            proposal: Of w, in the coordinates of scale^(1/2) M x; [h, r, r] and [h, r], or for one head.
            shift: [h, d] or [1, d].

        Raises:
            ValueError: The kernel has no such part, or the shape does not fit.
        """
        parts = {"M": M, "shift": shift}
        if proposal is not None:
            parts |= {"proposal_basis": proposal.basis, "proposal_variance": proposal.variance}
        for name, value in parts.items():
            if value is None:
                continue
            own = getattr(self, name, None)
            if own is None:
                raise ValueError(f"this kernel has no {name}; set geometry, proposal or shift when you build it.")
            if value.shape[1:] != own.shape[1:] or len(value) not in (1, len(own)):
                raise ValueError(f"{name} of shape {tuple(value.shape)} does not fit {tuple(own.shape)}.")
            own.copy_(value)

    def matrix(self) -> Tensor | None:
        """Return M [G, r, d], or None for the identity."""
        if self.geometry == "temperature":
            return self.M[:, None, None] * torch.eye(self.head_dim, device=self.M.device)
        return getattr(self, "M", None)

    def features(self) -> Features:
        """Return the features as the operators take them, differentiable in what is learned."""
        if not self.training and self._trained:
            self._trained = False  # only redraw changes w: a model in training need not look at each step
        self.follow(trains=self.training and torch.is_grad_enabled())
        proposal = None if self.proposal is None else Proposal(self.proposal_basis, self.proposal_variance)
        return fold_features(
            self.w, self.matrix(), self.head_dim, self.scale, self.shift, proposal, self.orthogonal and self.draws
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Return the attention [B, h, N, e] of q [B, h, N, d] to k [B, H, L, d] and v [B, H, L, e].

        ``mask`` [B, L] is True for keys that may be seen; see
        :func:`mmspectral.ops.random_features.linear_attention`.
        """
        if isinstance(q, fx.Proxy):
            return as_leaf(self, q, k, v, mask, causal)
        return linear_attention(q, k, v, self.features(), mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the logits whose softmax over keys the attention is, [B, h, N, L]; of quadratic cost."""
        h = q.shape[1]
        features = Features(*(t if t is None else t.repeat_interleave(h // len(t), 0) for t in self.features()))
        return kernel_logits(q, k.repeat_interleave(h // k.shape[1], 1), features)

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, d={self.head_dim}, m={self.num_features}, rank={self.rank}, "
            f"geometry={self.geometry!r}, sharing={self.sharing!r}, proposal={self.proposal!r}, seed={self.seed}, "
            f"layer={self.layer}"
        )

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.draws and f"{prefix}w" in state_dict and not self.w.is_meta:
            counter = int(self.redraws)
            own = draw_projection(self.num_features, self.rank, self.seed, self.layer, counter, self.orthogonal)
            self._foreign = not torch.allclose(self.w, own.to(self.w), atol=1e-4)  # of another seed
        self._trained = False
        self.mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RandomFeatureKernel":
        """Move and cast as ``nn.Module`` does, but keep buffers in float32: rounded draws are not orthogonal."""
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            if self._buffers[name].is_floating_point() and self._buffers[name].dtype.itemsize < 4:
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self


def share_geometry(model: nn.Module) -> None:
    """Give all kernels of ``model`` with ``sharing="model"`` the M of the first; call it before an optimizer is built.

    Raises:
        ValueError: Their shapes differ.
    """
    kernels = [m for m in model.modules() if isinstance(m, RandomFeatureKernel) and m.sharing == "model"]
    for kernel in kernels[1:]:
        if kernel.M.shape != kernels[0].M.shape:
            raise ValueError(
                f"sharing='model' needs one shape of M in all layers, got {tuple(kernels[0].M.shape)} and "
                f"{tuple(kernel.M.shape)}; use 'layer' in models whose heads differ in width."
            )
        kernel.M = kernels[0].M


def _start(rank: int, dim: int, seed: int, layer: int) -> Tensor:
    if rank == dim:
        return torch.eye(dim)
    directions = draw_projection(rank, dim, seed, layer)
    return directions / directions.norm(dim=-1, keepdim=True) * (dim / rank) ** 0.5


def feature_kernels(model: nn.Module) -> dict[str, RandomFeatureKernel]:
    """Return the random-feature kernels of ``model`` by name, in module order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RandomFeatureKernel)}


class SoftmaxKernel(nn.Module):
    """Exact attention."""

    def __init__(self, num_heads: int, head_dim: int, *, scale: float | None = None, layer: int = 0) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if isinstance(q, fx.Proxy):
            return as_leaf(self, q, k, v, mask, causal)
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
        if isinstance(q, fx.Proxy):
            return as_leaf(self, q, k, v, mask, causal)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return uniform_attention(v, q.shape[2], mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.zeros(*q.shape[:3], k.shape[2], device=q.device)


class ConstantKernel(RandomFeatureKernel):
    """Linear attention between fixed random codes of the positions, N(0, I), whatever the content."""

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if isinstance(q, fx.Proxy):
            return as_leaf(self, q, k, v, mask, causal)
        return super().forward(self._codes(q), self._codes(k), v, mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(self._codes(q), self._codes(k))

    def _codes(self, tokens: Tensor) -> Tensor:
        return position_codes(tokens.shape[2], self.head_dim, self.seed, self.layer).to(tokens.device).expand_as(tokens)


_TYPES = dict(
    dark=RandomFeatureKernel,
    performer=partial(RandomFeatureKernel, geometry=None),
    temperature=partial(RandomFeatureKernel, geometry="temperature"),
    learned=partial(RandomFeatureKernel, geometry=None, train_features=True),
    constant=ConstantKernel,
    uniform=UniformKernel,
    softmax=SoftmaxKernel,
)
_FEATURES = ("num_features", "orthogonal", "seed", "shift")
_ARGUMENTS = dict(
    dark=(*_FEATURES, "proposal", "rank", "sharing"),
    performer=(*_FEATURES, "proposal"),
    temperature=(*_FEATURES, "proposal"),
    learned=_FEATURES,
    constant=("num_features", "seed"),
    uniform=(),
    softmax=(),
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
    name, arguments = type_and_arguments("kernel", cfg, _ARGUMENTS)
    return _TYPES[name](num_heads, head_dim, scale=scale, layer=layer, **arguments)

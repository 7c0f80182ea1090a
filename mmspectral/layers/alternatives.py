"""What practitioners compare spectral conditioning with: one config line each, on the same sites.

Normalised queries and keys (arXiv 2302.05442, section 2; timm's ``qk_norm``),
projections divided by their largest singular value (arXiv 1802.05957,
2303.06296), and an orthogonal start (arXiv 1312.6120). Importing this module
makes them known to ``conditioning=dict(type=...)``; None leaves projections alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mmspectral.arguments import check, whole
from mmspectral.layers.projection import (
    Conditioning,
    Follows,
    Projection,
    as_leaf,
    in_backward_pass,
    positive,
    register_conditioning,
)
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.precision import at_least_float32, without_autocast

MAX_ITERATIONS = 1000  # in each forward pass; more is a mistake and looks like a hang
START_ITERATIONS = 8  # of the block power method, wherever the singular vectors are not known
BLOCK = 32  # vectors in it: the largest singular values of wide random matrices lie close together


class HeadLayerNorm(nn.LayerNorm):
    """Layer norm with gain and without bias over the d channels of a head, in float32 or better."""

    def __init__(self, d: int, eps: float, **kwargs) -> None:
        super().__init__(d, eps, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        weight = at_least_float32(self.weight)
        return F.layer_norm(at_least_float32(x).to(weight.dtype), self.normalized_shape, weight, None, self.eps)


class HeadRMSNorm(nn.RMSNorm):
    """Root-mean-square norm with gain over the d channels of a head, in float32 or better."""

    def __init__(self, d: int, eps: float, **kwargs) -> None:
        super().__init__(d, eps, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        weight = at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x).to(weight.dtype), self.normalized_shape, weight, self.eps)


NORMS = {"layer": HeadLayerNorm, "rms": HeadRMSNorm}


@register_conditioning
class QKNorm(Conditioning):
    """Normalise q and k of each token and head, with a learned gain per channel.

    Without bias both norms give vectors of length at most sqrt(d) max|gain|, so
    dot-product logits at scale 1 / sqrt(d) stay within
    sqrt(d) max|gain_q| max|gain_k|, whatever the weights and tokens are. One
    gain is shared by the heads, as in timm and ViT-22B.

    Args:
        norm: ``"layer"`` (ViT-22B and timm's default) or ``"rms"``.
        eps: Added to the variance or mean square.
        targets: ``("q", "k")`` or one of them.

    Raises:
        ValueError: Unknown norm or target, ``eps`` not positive, or v targeted.
    """

    changes_weights = False

    def __init__(self, norm: str = "layer", eps: float = 1e-6, targets: Sequence[str] = ("q", "k")) -> None:
        super().__init__(targets)
        if "v" in self.targets:
            raise ValueError(f"QKNorm normalises q and k; take v out of targets={targets!r}.")
        if norm not in tuple(NORMS):
            raise ValueError(f"QKNorm: norm must be one of {', '.join(NORMS)}, got {norm!r}.")
        self.norm, self.eps = norm, positive("QKNorm: eps", eps)

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return QKNormLinear(linear, self, layout)

    def settings(self) -> dict:
        return dict(super().settings(), norm=self.norm, eps=self.eps)


class QKNormLinear(Projection, nn.Linear):
    """Projection followed by the norms ``q_norm`` and ``k_norm`` of what it projects to."""

    shows_weight = False

    def make_state(self) -> None:
        weight = self.own("weight")
        form = dict(device=weight.device, dtype=weight.dtype)
        d = self.layout.rows_per_head(self.out_features)
        for p in self.targeted:
            norm = NORMS[self.conditioning.norm](d, self.conditioning.eps, **form)
            self.add_module(f"{self.layout.roles[p]}_norm", norm.requires_grad_(weight.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return as_leaf(self, x)
        y = F.linear(x, self.own("weight"), self.bias)
        parts = list(self.layout.heads(y, dim=-1).unbind(-3))  # each [..., h, d]
        for p in self.targeted:
            parts[p] = self.get_submodule(f"{self.layout.roles[p]}_norm")(parts[p]).to(y.dtype)
        return self.layout.join_heads(torch.stack(parts, -3), dim=-3)

    def folded(self) -> nn.Linear:
        raise ValueError(
            "QKNorm cannot be folded: it divides q and k by a length that differs from token to token, "
            "which no weight can do. Keep the projection as it is, with its q_norm and k_norm."
        )


class SigmaDivision(Conditioning):
    """Base of what divides each projection by its largest singular value sigma.

    Each [D, E] projection is divided by its own sigma, never the fused matrix.

    Args:
        power_iterations: Steps of the power method in a training forward.
        targets: Which of ``"q"``, ``"k"``, ``"v"`` are divided.

    Raises:
        ValueError: Fewer than one step or more than ``MAX_ITERATIONS``, or unknown target.
    """

    def __init__(self, power_iterations: int = 1, targets: Sequence[str] = ("q", "k", "v")) -> None:
        super().__init__(targets)
        self.power_iterations = check(
            f"{type(self).__name__}: power_iterations", power_iterations, whole(1, MAX_ITERATIONS)
        )

    def settings(self) -> dict:
        return dict(super().settings(), power_iterations=self.power_iterations)


@register_conditioning
class SpectralNorm(SigmaDivision):
    """W / sigma(W) on each projection (arXiv 1802.05957, equation 8)."""

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return SpectralNormLinear(linear, self, layout)


@register_conditioning
class SigmaReparam(SigmaDivision):
    """gamma W / sigma(W) on each projection, with a learned number gamma (arXiv 2303.06296, section 3.2).

    Args:
        gamma: Start of gamma, 1 in the paper. None starts it at sigma(W), which
            keeps the function of the weights at the start, or of those loaded from a
            checkpoint without gamma.

    Raises:
        ValueError: ``gamma`` is neither None nor positive and finite.
    """

    def __init__(
        self,
        gamma: float | None = 1.0,
        power_iterations: int = 1,
        targets: Sequence[str] = ("q", "k", "v"),
    ) -> None:
        super().__init__(power_iterations, targets)
        if gamma is not None:
            positive("SigmaReparam: gamma", gamma, "None or positive and finite")
        self.gamma = gamma
        self.adopts_stock_weights = gamma is None

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return SigmaReparamLinear(linear, self, layout)

    def settings(self) -> dict:
        return dict(super().settings(), gamma=self.gamma)


class SpectralNormLinear(Follows, Projection, nn.Linear):
    """Projection whose P' targeted matrices are divided by their sigma = u^T W v.

    The buffers ``left`` (u, [P', D]) and ``right`` (v, [P', E]) follow the
    weight by the power method: some steps in every training forward. In eval
    mode u and v are computed once for each weight, to 1 % of sigma or better, and
    the buffers stay. sigma is differentiated through W with u and v constant, as in
    ``torch.nn.utils.parametrizations.spectral_norm``. That one acts on a whole
    parameter, hence on the fused matrix, and renames it to
    ``parametrizations.weight.original``, where stock checkpoints do not fit and
    mmengine's initialisers write into a temporary; so it is not used here.

    Vectors that are not in a loaded state dict, and those of a re-initialised or
    averaged weight, start from a fixed draw, equal on every rank. A forward that
    activation checkpointing repeats within the backward pass takes no step, so it
    computes what the forward before that pass did.
    """

    shows_weight = False  # no power iteration would follow the weight

    def make_state(self) -> None:
        weight = self.own("weight")
        form = dict(device=weight.device, dtype=at_least_float32(weight).dtype)
        self.register_buffer("left", torch.zeros(len(self.targeted), len(weight) // len(self.layout.roles), **form))
        self.register_buffer("right", torch.zeros(len(self.targeted), self.in_features, **form))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute ``left`` and ``right`` from the present weight; gamma stays."""
        if self.own("weight").is_meta:
            return
        left, right = self._found()
        self.left.copy_(left)
        self.right.copy_(right)
        self.mark()

    def followed(self) -> list[Tensor]:
        return [self.own("weight"), self.left, self.right]

    def sigma(self) -> Tensor:
        """Return the estimate u^T W v of the largest singular values, [P'], in float32 or better."""
        matrices = self._matrices()
        # Clones, since the step of a later forward must not reach into this one's graph.
        vectors = (self.left, self.right) if self.training else self._vectors_of_evaluation()
        left, right = (vector.to(matrices.dtype, copy=True) for vector in vectors)
        with without_autocast(matrices.device):
            return (left * torch.einsum("pde,pe->pd", matrices, right)).sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not in_backward_pass() and not isinstance(x, fx.Proxy):
            self.follow(trains=torch.is_grad_enabled())
            self._step(self.conditioning.power_iterations)
        return super().forward(x)

    def train(self, mode: bool = True) -> SpectralNormLinear:
        """Set the mode; what evaluation needs is there before it is compiled."""
        super().train(mode)
        if not mode and "right" in self._buffers:
            self._vectors_of_evaluation()
        return self

    def folded(self) -> nn.Linear:
        training, self.training = self.training, False
        try:
            return super().folded().train(training)
        finally:
            self.training = training

    def _vectors_of_evaluation(self) -> tuple[Tensor, Tensor]:
        """Return u and v of the present weight, computed once; where it cannot be read, those of the last time."""
        return self.once(self.own("weight"), self._found, (self.left, self.right))

    def _effective(self, name: str, dtype: torch.dtype | None) -> Tensor:
        weight = self.own("weight")
        sigma = self.sigma()
        factors = sigma.new_ones(len(self.layout.roles))
        factors[self.targeted] = self._numerator() / torch.where(sigma == 0, 1.0, sigma)  # zero matrices stay zero
        return (weight * self.layout.row_factors(factors, len(weight))[:, None]).to(dtype or weight.dtype)

    def _numerator(self) -> Tensor | float:
        return 1.0

    def _matrices(self) -> Tensor:
        """Return the targeted projections, [P', D, E], in float32 or better."""
        weight = self.own("weight")
        if isinstance(weight, fx.Proxy):
            raise TypeError(
                f"{self.site or type(self).__name__}: torch.fx cannot trace {self.conditioning}, which follows the "
                "weight by power iterations. Fold the model first."
            )
        matrices = self.layout.split(weight)
        return at_least_float32(matrices if len(self.targeted) == len(matrices) else matrices[self.targeted])

    @torch.no_grad()
    def _found(self) -> tuple[Tensor, Tensor]:
        """Return the first singular vectors, [P', D] and [P', E], by a block power method."""
        matrices = self._matrices()
        block = min(BLOCK, *matrices.shape[1:])
        start = torch.randn(self.in_features, block, generator=torch.Generator().manual_seed(0), device="cpu")
        with without_autocast(matrices.device):
            basis = start.to(matrices).expand(len(matrices), -1, -1)
            for _ in range(START_ITERATIONS):
                basis = torch.linalg.qr(matrices.mT @ (matrices @ basis)).Q
            left, _, right = torch.linalg.svd(matrices @ basis, full_matrices=False)
            return left[..., 0], (basis @ right[:, :1].mT)[..., 0]

    @torch.no_grad()
    def _step(self, steps: int) -> None:
        matrices = self._matrices()
        left, right = self.left.to(matrices.dtype), self.right.to(matrices.dtype)
        with without_autocast(matrices.device):
            for _ in range(steps):
                left = _direction(torch.einsum("pde,pe->pd", matrices, right), left)
                right = _direction(torch.einsum("pde,pd->pe", matrices, left), right)
        self.left.copy_(left)
        self.right.copy_(right)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}weight" in state_dict and not {f"{prefix}left", f"{prefix}right"} <= set(state_dict):
            self.refresh()
        self._trained = False
        self.mark()


class SigmaReparamLinear(SpectralNormLinear, nn.Linear):
    """Spectral norm times a learned parameter ``gamma``, [P'], one number for each targeted projection."""

    def make_state(self) -> None:
        super().make_state()
        self.gamma = nn.Parameter(torch.empty_like(self.left[:, 0]), requires_grad=self.own("weight").requires_grad)
        self._start_gamma()

    def init_weights(self) -> None:
        """Recompute the singular vectors of a re-initialised weight, and restart gamma."""
        super().init_weights()
        self._start_gamma()

    def _numerator(self) -> Tensor:
        return at_least_float32(self.gamma)

    @torch.no_grad()
    def _start_gamma(self) -> None:
        gamma = self.conditioning.gamma
        self.gamma.copy_(self.sigma() if gamma is None else torch.full_like(self.gamma, gamma))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}weight" in state_dict and f"{prefix}gamma" not in state_dict:
            self._start_gamma()


def _direction(vectors: Tensor, fallback: Tensor) -> Tensor:
    """Return vectors [P', n] at length 1, and the fallback for those that are zero."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(length > 0, vectors / length, fallback)


@register_conditioning
class OrthogonalInit(Conditioning):
    """Start each projection at a random (semi-)orthogonal matrix times ``gain``: kappa = 1, then training moves it.

    The draw is ``torch.nn.init.orthogonal_``'s (arXiv 1312.6120), on each
    [D, E] projection by itself. It follows the model's own initialisation,
    whose biases and other projections stay, and precedes checkpoints, which win.
    Nothing but the start differs from the stock model.

    Args:
        gain: Singular value of every projection at the start. A trunc-normal
            D x D matrix of standard deviation 0.02 has the same Frobenius norm
            at gain 0.02 sqrt(D).
        targets: Which of ``"q"``, ``"k"``, ``"v"`` are initialised so.

    Raises:
        ValueError: ``gain`` is not positive and finite, or unknown target.
    """

    changes_weights = False

    def __init__(self, gain: float = 1.0, targets: Sequence[str] = ("q", "k", "v")) -> None:
        super().__init__(targets)
        self.gain = positive("OrthogonalInit: gain", gain)

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return OrthogonalLinear(linear, self, layout)

    def settings(self) -> dict:
        return dict(super().settings(), gain=self.gain)


class OrthogonalLinear(Projection, nn.Linear):
    """``nn.Linear`` whose targeted projections are drawn orthogonal whenever its weight is initialised."""

    changes_function = False
    _loading = False

    def make_state(self) -> None:
        if not self._loading:
            self.init_weights()

    def _load_from_state_dict(self, *args) -> None:
        self._loading = True  # with assign=True this is the first weight of a projection built on the meta device
        try:
            super()._load_from_state_dict(*args)
        finally:
            self._loading = False

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise the targeted projections, from torch's global generator."""
        weight = self.own("weight")
        if weight.is_meta:
            return
        heads = self.layout.split(weight, "head")  # a view [P, h, d, E]
        for p in self.targeted:
            start = torch.empty_like(at_least_float32(heads[p].flatten(0, 1)))  # QR needs float32
            nn.init.orthogonal_(start, self.conditioning.gain)
            heads[p].copy_(start.view_as(heads[p]))

    def _effective(self, name: str, dtype: torch.dtype | None) -> Tensor:
        return self.own("weight")

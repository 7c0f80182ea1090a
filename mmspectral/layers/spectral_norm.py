"""Projections divided by their largest singular value: spectral norm and sigma-reparametrisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.layers.base import Conditioning, is_finite_number, register_conditioning
from mmspectral.layers.switched_linear import SwitchedLinear
from mmspectral.ops import ProjectionLayout
from mmspectral.ops.precision import at_least_float32, without_autocast

MAX_ITERATIONS = 1000  # in each forward pass; more is a mistake and looks like a hang
START_ITERATIONS = 32  # of the power method, wherever the singular vectors are not known


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
        whole = isinstance(power_iterations, int) and not isinstance(power_iterations, bool)
        if not whole or not 1 <= power_iterations <= MAX_ITERATIONS:
            raise ValueError(
                f"{type(self).__name__}: power_iterations must be an integer of at least 1 and at most "
                f"{MAX_ITERATIONS}, got {power_iterations!r}."
            )
        self.power_iterations = power_iterations

    def settings(self) -> dict:
        return dict(super().settings(), power_iterations=self.power_iterations)


@register_conditioning
class SpectralNorm(SigmaDivision):
    """W / sigma(W) on each projection (arXiv 1802.05957, equation 8).

    Args:
        power_iterations: See :class:`SigmaDivision`.
        targets: See :class:`SigmaDivision`.
    """

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return SpectralNormLinear(linear, self, layout)


@register_conditioning
class SigmaReparam(SigmaDivision):
    """gamma W / sigma(W) on each projection, with a learned number gamma (arXiv 2303.06296, section 3.2).

    Args:
        gamma: Start of gamma, 1 in the paper. None starts it at sigma(W), which
            keeps the function of the weights that are drawn, or loaded from a
            checkpoint without gamma.
        power_iterations: See :class:`SigmaDivision`.
        targets: See :class:`SigmaDivision`.

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
        if gamma is not None and not (is_finite_number(gamma) and gamma > 0):
            raise ValueError(f"SigmaReparam: gamma must be None or positive and finite, got {gamma!r}.")
        self.gamma = gamma
        self.adopts_stock_weights = gamma is None

    def replace(self, linear: nn.Linear, layout: ProjectionLayout) -> nn.Module:
        return SigmaReparamLinear(linear, self, layout)

    def settings(self) -> dict:
        return dict(super().settings(), gamma=self.gamma)


class SpectralNormLinear(SwitchedLinear, nn.Linear):
    """Projection whose P' targeted matrices are divided by their sigma = u^T W v.

    The buffers ``left`` (u, [P', D]) and ``right`` (v, [P', E]) follow the
    weight by the power method: some steps in every training forward, none in
    eval mode. sigma is differentiated through W with u and v constant, all as in
    ``torch.nn.utils.parametrizations.spectral_norm``. That one acts on a whole
    parameter, hence on the fused matrix, and renames it to
    ``parametrizations.weight.original``, where stock checkpoints do not fit and
    mmengine's initialisers write into a temporary; so it is not used here.

    Vectors that are not in a loaded state dict, and those of a weight drawn
    anew, start from a fixed draw, equal on every rank, by ``START_ITERATIONS``
    steps. A forward that activation checkpointing repeats within the backward
    pass takes no step, so it computes what the forward before that pass did.
    An averaged copy (EMA, SWA) gets the vectors of the trained model, with which
    sigma comes out too small: call :meth:`refresh` on its projections.

    Args:
        linear: The projection to replace.
        conditioning: Settings.
        layout: What the rows of the weight are.
    """

    def make_state(self) -> None:
        """Make ``left`` and ``right`` for the present weight."""
        P, D = len(self.targeted), self.layout.num_heads * self.rows_per_head
        form = dict(device=self.weight.device, dtype=at_least_float32(self.weight).dtype)
        self.register_buffer("left", torch.zeros(P, D, **form))
        self.register_buffer("right", torch.zeros(P, self.in_features, **form))
        self.refresh()

    def init_weights(self) -> None:
        """Find the singular vectors of a weight that was drawn anew."""
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Find ``left`` and ``right`` again from the present weight; gamma stays."""
        if self.weight.is_meta:
            return
        start = torch.randn(self.in_features, generator=torch.Generator().manual_seed(0), device="cpu")
        self.right.copy_(start)
        self._step(START_ITERATIONS)

    def sigma(self) -> Tensor:
        """Return the estimate u^T W v of the largest singular values, [P'], in float32 or better."""
        matrices = self._matrices()
        # Clones, since the step of a later forward must not reach into this one's graph.
        left, right = self.left.to(matrices.dtype, copy=True), self.right.to(matrices.dtype, copy=True)
        with without_autocast(matrices.device):
            return (left * torch.einsum("pde,pe->pd", matrices, right)).sum(-1)

    def effective_weight(self) -> Tensor:
        """Return what the tokens are multiplied with, [P * D, E], in the dtype of the weight."""
        sigma = self.sigma()
        factors = sigma.new_ones(len(self.layout.roles))
        factors[self.targeted] = self._numerator() / torch.where(sigma == 0, 1.0, sigma)  # zero matrices stay zero
        return (self.weight * self.per_row(factors)[:, None]).to(self.weight.dtype)

    def folded(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` with the effective weight and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.effective_weight().detach(), requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [..., E] to [..., P * D]."""
        if self.training and (torch.compiler.is_compiling() or not _in_backward_pass()):
            self._step(self.conditioning.power_iterations)
        return F.linear(x, self.effective_weight(), self.bias)

    def _numerator(self) -> Tensor | float:
        return 1.0

    def _matrices(self) -> Tensor:
        """Return the targeted projections, [P', D, E], in float32 or better."""
        matrices = ops.split_projections(self.weight, self.layout)
        return at_least_float32(matrices if len(self.targeted) == len(matrices) else matrices[self.targeted])

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


class SigmaReparamLinear(SpectralNormLinear, nn.Linear):
    """Spectral norm times a learned parameter ``gamma``, [P'], one number for each targeted projection.

    Args:
        linear: The projection to replace.
        conditioning: Settings.
        layout: What the rows of the weight are.
    """

    def make_state(self) -> None:
        """Make ``left``, ``right`` and ``gamma`` for the present weight."""
        super().make_state()
        self.gamma = nn.Parameter(torch.empty_like(self.left[:, 0]), requires_grad=self.weight.requires_grad)
        self._start_gamma()

    def init_weights(self) -> None:
        """Find the singular vectors of a weight that was drawn anew, and start gamma again."""
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


def _in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1  # no public function tells; torch.utils.checkpoint asks it too

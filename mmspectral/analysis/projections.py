"""The q, k and v projections of a model, conditioned or not, and their singular values."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.layers.packed_attention import weight_layouts
from mmspectral.ops import ProjectionLayout

# Names under which attention layers hold their projections, and what the rows are.
STOCK_NAMES = {"qkv": ("q", "k", "v"), "q": ("q",), "k": ("k",), "v": ("v",)}


@dataclass(frozen=True)
class Spectrum:
    """Extreme singular values of one projection.

    Args:
        sigma_max: The largest; for scope ``head`` over all heads.
        sigma_min: The smallest likewise.
        kappa: sigma_max / sigma_min; for scope ``head`` the worst head's.
            Infinite for a rank-deficient matrix, nan for one that is not finite.
    """

    sigma_max: float
    sigma_min: float
    kappa: float

    @property
    def rank_deficient(self) -> bool:
        """Whether sigma_min is zero at working precision, so that kappa is no number."""
        return self.kappa == float("inf")


@dataclass(frozen=True)
class AttentionProjection:
    """One fused or separate projection of an attention layer.

    Args:
        name: Module name, or that of the parameter in an ``nn.MultiheadAttention``.
        module: The module that holds the weight.
        layout: The rows of the weight.
        parameter: The weight's name in the module; [P * D, E].
    """

    name: str
    module: nn.Module
    layout: ProjectionLayout
    parameter: str = "weight"

    @property
    def weight(self) -> nn.Parameter:
        """W [P * D, E]."""
        return getattr(self.module, self.parameter)

    @property
    def scope(self) -> str:
        """Scope of the conditioning; ``"full"`` where it has none."""
        return getattr(getattr(self.module, "conditioning", None), "scope", "full")

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return W and what the layer multiplies by, each [P * D, E], float64, on the CPU.

        There and in that precision, so that every device gives the same numbers
        and half-precision weights can be decomposed at all. The second is W
        itself where nothing acts on the weight.
        """
        weight = self.weight.detach().to("cpu", torch.float64)
        if not hasattr(self.module, "folded"):
            return weight, weight
        try:
            folded = copy.deepcopy(self.module).to("cpu", torch.float64).folded()
        except ValueError:  # acts on tokens, not on the weight, as QKNorm does
            return weight, weight
        return weight, getattr(folded, self.parameter).detach()

    def spectra(self) -> dict[str, tuple[Spectrum, Spectrum]]:
        """Return, per role, the spectra of W and of W + C, of the matrices that the scope is about.

        Cost: one singular value decomposition without vectors per role and
        matrix, O(D^2 E) each; half of that without a correction.
        """
        before, after = self.matrices()
        first = self._by_role(before)
        second = first if after is before else self._by_role(after)
        return {role: (first[role], second[role]) for role in self.layout.roles}

    def gradient_norms(self) -> dict[str, float]:
        """Return, per role, the Frobenius norm of the gradient of W; empty where there is none."""
        gradient = self.weight.grad
        if gradient is None:
            return {}
        blocks = self.layout.split(gradient.detach().double())  # [P, D, E]
        return dict(zip(self.layout.roles, blocks.flatten(1).norm(dim=1).tolist(), strict=True))

    def _by_role(self, weight: Tensor) -> dict[str, Spectrum]:
        blocks = self.layout.split(weight, self.scope)  # [P, D, E] or [P, h, d, E]
        return dict(zip(self.layout.roles, map(spectrum, blocks), strict=True))


@torch.no_grad()
def spectrum(matrix: Tensor) -> Spectrum:
    """Return the extreme singular values of [..., rows, columns], with the worst kappa of a batch.

    kappa is infinite where :func:`mmspectral.ops.condition_number` says so.
    """
    if not matrix.isfinite().all():
        return Spectrum(float("nan"), float("nan"), float("nan"))
    sigma = ops.singular_values(matrix)
    kappa = ops.condition_number_of(sigma, matrix.shape)
    return Spectrum(sigma[..., 0].max().item(), sigma[..., -1].min().item(), kappa.max().item())


def attention_projections(model: nn.Module) -> dict[str, AttentionProjection]:
    """Return the q, k, v projections of ``model`` by name, in module order.

    These are all modules with a ``weight`` that state a :class:`ProjectionLayout`
    (every conditioned one), every ``nn.MultiheadAttention`` and, so that a stock
    twin can be compared, the plain ``nn.Linear``s that a module with an integer
    ``num_heads`` holds as ``qkv`` (three times as many rows as columns) or as
    ``q``, ``k`` and ``v``. Their rows are taken as q, k, v one after the other,
    as ViT, Swin and XCiT have them.
    """
    found = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        layout = getattr(module, "layout", None)
        heads = getattr(module, "num_heads", None)
        if isinstance(module, nn.MultiheadAttention):
            for parameter, rows in weight_layouts(module).items():
                full_name = f"{prefix}{parameter}"
                found[full_name] = AttentionProjection(full_name, module, rows, parameter)
        elif isinstance(layout, ProjectionLayout) and isinstance(getattr(module, "weight", None), Tensor):
            found[name] = AttentionProjection(name, module, layout)
        elif isinstance(heads, int):
            for child, roles in STOCK_NAMES.items():
                linear = getattr(module, child, None)
                if type(linear) is nn.Linear and _fits(linear, roles, heads):
                    full_name = f"{prefix}{child}"
                    found[full_name] = AttentionProjection(full_name, linear, ProjectionLayout(roles, heads))
    return found


def _fits(linear: nn.Linear, roles: tuple[str, ...], heads: int) -> bool:
    fused = len(roles) == 1 or linear.out_features == len(roles) * linear.in_features
    return fused and linear.out_features % (len(roles) * heads) == 0


def spread(names: Sequence[str], count: int) -> list[str]:
    """Return at most ``count`` of ``names``, evenly spaced, with the first and the last.

    Raises:
        ValueError: ``count`` is less than 1.
    """
    if count < 1:
        raise ValueError(f"at least one layer must be chosen, got {count}.")
    if count >= len(names):
        return list(names)
    if count == 1:
        return [names[0]]
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]

"""The q, k and v projections of a model, conditioned or not: singular values and condition numbers."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.arguments import checked, whole
from mmspectral.layers import conditioned_projections, find_sites, weight_layouts
from mmspectral.layers.sites import FUSED, SEPARATE
from mmspectral.ops import ProjectionLayout


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one projection.

    Args:
        sigma_max: The largest; for scope ``head`` over all heads.
        sigma_min: The smallest likewise.
        kappa: sigma_max / sigma_min; for scope ``head`` the worst head's.
            Infinite for a rank-deficient matrix, nan for one that is not finite.
        sigma: All of the matrix with that kappa, largest first; empty where it is not finite.
    """

    sigma_max: float
    sigma_min: float
    kappa: float
    sigma: Tensor = field(compare=False, repr=False)

    @property
    def rank_deficient(self) -> bool:
        """Whether sigma_min is zero at working precision, so that kappa is no number."""
        return self.kappa == float("inf")


@dataclass(frozen=True)
class AttentionProjection:
    """One projection of an attention layer: a module, or a parameter [P * D, E] of an ``nn.MultiheadAttention``.

    ``name`` is that of the module or of the parameter; ``layout`` says what the rows are.
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

    def of(self, model: nn.Module) -> "AttentionProjection":
        """Return the projection of this name in another model of the same architecture; ValueError if there is none."""
        try:
            module = model.get_submodule(self.name.removesuffix(f".{self.parameter}"))
            fits = getattr(module, self.parameter).shape == self.weight.shape
        except AttributeError:
            fits = False
        if not fits:
            raise ValueError(f"the model has no attention projection {self.name}: a twin has the same architecture.")
        return replace(self, module=module)

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

    def spectra(self, scope: str | None = None) -> dict[str, tuple[Spectrum, Spectrum]]:
        """Return, per role, the spectra of W and of W + C, of the matrices of ``scope``, by default its own.

        Without a correction both are the same object. Cost: one singular value decomposition
        without vectors per role and matrix, O(D^2 E) each; half of that without a correction.
        """
        before, after = self.matrices()
        first = self._by_role(before, scope)
        second = first if after is before else self._by_role(after, scope)
        return {role: (first[role], second[role]) for role in self.layout.roles}

    def gradient_norms(self) -> dict[str, float]:
        """Return, per role, the Frobenius norm of the gradient of W; empty where there is none."""
        gradient = self.weight.grad
        if gradient is None:
            return {}
        blocks = self.layout.split(gradient.detach().double())  # [P, D, E]
        return dict(zip(self.layout.roles, blocks.flatten(1).norm(dim=1).tolist(), strict=True))

    def _by_role(self, weight: Tensor, scope: str | None) -> dict[str, Spectrum]:
        blocks = self.layout.split(weight, scope or self.scope)  # [P, D, E] or [P, h, d, E]
        return dict(zip(self.layout.roles, map(spectrum, blocks), strict=True))


@torch.no_grad()
def spectrum(matrix: Tensor) -> Spectrum:
    """Return the spectrum of [..., rows, columns], with the worst kappa of a batch.

    kappa is infinite where :func:`mmspectral.ops.condition_number` says so.
    """
    if not matrix.isfinite().all():
        return Spectrum(float("nan"), float("nan"), float("nan"), matrix.new_empty(0))
    sigma = ops.singular_values(matrix)
    kappa = ops.condition_number_of(sigma, matrix.shape)
    worst = sigma.flatten(0, -2)[kappa.argmax()] if kappa.dim() else sigma
    return Spectrum(sigma[..., 0].max().item(), sigma[..., -1].min().item(), kappa.max().item(), worst)


def attention_projections(model: nn.Module, left_out: dict[str, str] | None = None) -> dict[str, AttentionProjection]:
    """Return the q, k, v projections of ``model`` by name, in module order.

    These are the modules that state their layout (every conditioned one), the
    weights of every ``nn.MultiheadAttention`` and, so that a stock twin can be
    compared, what :func:`mmspectral.layers.sites.find_sites` is certain of.

    Args:
        model: Any model; it stays as it is.
        left_out: Is given the reasons for attention layers whose rows are not certain, by name.
    """
    stock = _stock_layouts(model, {} if left_out is None else left_out)
    found = {}
    for name, module in model.named_modules():
        layout = getattr(module, "layout", stock.get(name))
        if isinstance(module, nn.MultiheadAttention):
            for parameter, rows in weight_layouts(module).items():
                path = f"{name}.{parameter}" if name else parameter
                found[path] = AttentionProjection(path, module, rows, parameter)
        elif isinstance(layout, ProjectionLayout) and isinstance(getattr(module, "weight", None), Tensor):
            found[name] = AttentionProjection(name, module, layout)
    return found


def _stock_layouts(model: nn.Module, left_out: dict[str, str]) -> dict[str, ProjectionLayout]:
    """Return the layouts of unconditioned projections by name, and put the layers that are not certain in left_out."""
    names = {*FUSED, *itertools.chain.from_iterable(SEPARATE)}
    owners = {
        name: module
        for name, module in model.named_modules()
        if any(child in names and isinstance(found, nn.Linear) for child, found in module.named_children())
    }
    layouts = {}

    def read(paths: Sequence[str]) -> None:
        for site in find_sites(nn.ModuleList(owners[path] for path in paths)):
            index, _, child = site.name.partition(".")
            if child in owners[paths[int(index)]]._modules:
                layouts[".".join(filter(None, (paths[int(index)], child)))] = site.layout

    try:
        read(list(owners))  # together, since layers of one kind are told apart once
    except ValueError:
        for path in owners:
            try:
                read([path])
            except ValueError as error:  # begins with the place in the list
                left_out[path] = ".".join(filter(None, (path, str(error).removeprefix("0."))))
    return layouts


@checked(count=whole(1))
def spread(names: Sequence[str], count: int) -> list[str]:
    """Return at most ``count`` of ``names``, evenly spaced, with the first and the last; ValueError below 1."""
    last = len(names) - 1
    if count > last:
        return list(names)
    return [names[round(i * last / max(count - 1, 1))] for i in range(count)]


@dataclass(frozen=True)
class ProjectionCondition:
    """Spectra of one projection of one layer.

    Args:
        layer: Module name of the (fused or separate) projection.
        role: ``"q"``, ``"k"`` or ``"v"``.
        without: Of W.
        with_: Of W + C; None where nothing acts on the weight.
    """

    layer: str
    role: str
    without: Spectrum
    with_: Spectrum | None

    @property
    def kappa_without(self) -> float:
        """kappa(W), the largest over the heads for scope ``head``."""
        return self.without.kappa

    @property
    def kappa_with(self) -> float | None:
        """kappa(W + C) likewise."""
        return self.with_ and self.with_.kappa


@torch.no_grad()
def projection_conditions(
    model: nn.Module, like: Mapping[str, AttentionProjection] | None = None
) -> list[ProjectionCondition]:
    """Return the spectra of the projections of a model, in float64.

    The matrix is that of the scope: the D x E projection for ``full``, the
    worst d x E head block for ``head``. A rank-deficient one has kappa = inf.

    Args:
        model: Any model with attention.
        like: Projections of another model, so that a stock twin is measured by the same
            matrices; by default every conditioned one of ``model``.

    Raises:
        ValueError: The model lacks one of the projections.
    """
    if like is None:
        conditioned = conditioned_projections(model)
        like = {name: each for name, each in attention_projections(model).items() if name in conditioned}
    return [
        ProjectionCondition(name, role, without, None if with_ is without else with_)
        for name, each in like.items()
        for role, (without, with_) in each.of(model).spectra(each.scope).items()
    ]

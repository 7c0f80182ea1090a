"""Condition numbers of the query, key and value projections, without and with their correction."""

from dataclasses import dataclass

import torch
from torch import nn

from mmspectral.analysis.projections import attention_projections
from mmspectral.layers import conditioned_projections


@dataclass(frozen=True)
class ProjectionCondition:
    """Condition numbers of one projection of one layer.

    Args:
        layer: Module name of the (fused or separate) projection.
        role: ``"q"``, ``"k"`` or ``"v"``.
        kappa_without: kappa(W), the largest over the heads for scope ``head``.
        kappa_with: kappa(W + C) likewise.
    """

    layer: str
    role: str
    kappa_without: float
    kappa_with: float


@torch.no_grad()
def projection_conditions(model: nn.Module) -> list[ProjectionCondition]:
    """Return the condition numbers of every conditioned projection, in float64.

    The matrix is that of the correction's scope: the D x E projection for
    ``full``, the worst d x E head block for ``head``. A rank-deficient one has
    kappa = inf.
    """
    conditioned = conditioned_projections(model)
    return [
        ProjectionCondition(name, role, without.kappa, with_.kappa)
        for name, projection in attention_projections(model).items()
        if name in conditioned
        for role, (without, with_) in projection.spectra().items()
    ]


def plot_projection_conditions(rows: list[ProjectionCondition], path: str, title: str = "") -> None:
    """Draw one panel per role: kappa over the layers, without and with the correction, on a log axis.

    Args:
        rows: What :func:`projection_conditions` returned.
        path: Picture to write; the suffix chooses the format.
        title: Text above the panels.

    Raises:
        ValueError: There is nothing to draw.
    """
    if not rows:
        raise ValueError("the model has no conditioned projection: build it with a `conditioning` dict.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    roles = [role for role in "qkv" if any(row.role == role for row in rows)]
    figure = Figure(figsize=(4 * len(roles), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(roles), sharey=True, squeeze=False)[0]
    names = {"q": "query", "k": "key", "v": "value"}
    for axis, role in zip(axes, roles, strict=True):
        chosen = [row for row in rows if row.role == role]
        layers = range(len(chosen))
        axis.semilogy(layers, [row.kappa_without for row in chosen], "o-", color="#c44e52", label="W (as trained)")
        axis.semilogy(layers, [row.kappa_with for row in chosen], "s-", color="#4c72b0", label="W + C")
        axis.set_title(f"{names[role]} projection")
        axis.set_xlabel("layer")
        axis.set_xticks(list(layers)[:: max(1, len(chosen) // 12)])
        axis.grid(True, which="major", alpha=0.3)
    axes[0].set_ylabel("condition number")
    axes[0].legend()
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=120)

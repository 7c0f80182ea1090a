"""The figures of the conditioning report: SVG in data URIs, drawn for light and for dark pages."""

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from torch import Tensor

from mmspectral.analysis.model_states import CORRELATIONS, ModelState

ROLES = {"q": "query", "k": "key", "v": "value"}
WIDTH = 9.9  # inches; equal for all figures, so that the page shows their text in one size
SPECTRUM_POINTS = 48
MAX_TICKS = 12
# Okabe and Ito's colours, which people with colour-blindness tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GRID = "#1f2328", "#c9ced6"
# The same on a dark page, each lighter or darker so that it stands out there.
DARK = dict(
    zip(
        (*COLORS, INK, GRID),
        ("#4aa3df", "#f0803c", "#2fc79a", "#e39cc4", "#f2b84b", "#8fd0f5", "#e6e8eb", "#4a5160"),
        strict=True,
    )
)
_WITHOUT = dict(linestyle="--", marker="o", markersize=4, markerfacecolor="none")
_WITH = dict(linestyle="-", marker="s", markersize=4)


@dataclass(frozen=True)
class ReportFigure:
    """One figure.

    Args:
        light: Data URI of the SVG for light pages.
        dark: The same for dark pages.
        alt: What the picture shows, for those who do not see it.
        caption: How to read it.
    """

    light: str
    dark: str
    alt: str
    caption: str


def kappa_figure(states: Sequence[ModelState]) -> ReportFigure:
    """Draw kappa over the layers, a panel per role and a colour per state."""
    roles = _roles(states)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(roles), sharey=True, squeeze=False)[0]
        for axis, role in zip(axes, roles, strict=True):
            for color, state in zip(_colors(len(states)), states, strict=True):
                rows = [row for row in state.spectra if row.role == role]
                layers = range(len(rows))
                axis.semilogy(layers, [_finite(row.kappa_without) for row in rows], color=color, **_WITHOUT)
                if state.conditioned:
                    axis.semilogy(layers, [_finite(row.kappa_with) for row in rows], color=color, **_WITH)
            _layer_axis(axis, len(rows), f"{ROLES[role]} projection")
        axes[0].set_ylabel("condition number")
        _whole_decades(axes)
        _legend(figure, states)

    worst = []
    for state in states:
        text = f"{state.label}: largest {_spoken(max(row.kappa_without for row in state.spectra))} for W"
        if state.conditioned:
            corrected = max(row.kappa_with for row in state.spectra if row.kappa_with is not None)
            text += f", {_spoken(corrected)} for W + C"
        worst.append(text)
    return _render(
        draw,
        (WIDTH, 3.3 + 0.25 * len(states)),
        f"Condition number of each projection over the layers. {'; '.join(worst)}.",
        "Condition number of each projection, the first layer on the left, on a logarithmic axis. "
        "A rank-deficient matrix has no point, and neither has W + C of a layer without a correction. "
        "Equal curves hide each other: a model and its twin start from the same W.",
    )


def spectra_figure(state: ModelState) -> ReportFigure:
    """Draw the singular values of every projection of one state, a panel per role and a colour per layer."""
    roles = _roles([state])
    count = max(sum(row.role == role for row in state.spectra) for role in roles)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(roles), sharey=True, squeeze=False)[0]
        # The ends of the map are left out: its darkest and lightest colours vanish on one of the two pages.
        shades = colormaps["viridis"].resampled(256)
        span = Normalize(-0.25 * count, 1.15 * count)
        for axis, role in zip(axes, roles, strict=True):
            for i, row in enumerate(row for row in state.spectra if row.role == role):
                color = shades(span(i))
                axis.semilogy(*_thinned(row.without), color=color, linestyle="--", linewidth=1)
                if row.with_ is not None:
                    axis.semilogy(*_thinned(row.with_), color=color, linestyle="-", linewidth=1.2)
            axis.set_title(f"{ROLES[role]} projection")
            axis.set_xlabel("rank of the singular value (share)")
            axis.grid(True, which="major")
        axes[0].set_ylabel("singular value")
        _whole_decades(axes)
        mappable = ScalarMappable(Normalize(0, max(count - 1, 1)), _cut(shades, span, count))
        bar = figure.colorbar(mappable, ax=list(axes), label="layer", pad=0.02)
        bar.set_ticks(_ticks(count))
        handles = [Line2D([], [], color=INK, linestyle="--", label="W")]
        if state.conditioned:
            handles.append(Line2D([], [], color=INK, linestyle="-", label="W + C"))
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)

    kinds = "W (dashed) and W + C (solid)" if state.conditioned else "W (no correction)"
    return _render(
        draw,
        (WIDTH, 3.6),
        f"Singular values of {kinds} of every projection, {state.label}.",
        f"Singular values of {kinds}, {state.label}, largest first, on a logarithmic axis; "
        f"up to {SPECTRUM_POINTS} of each spectrum are drawn, with both ends.",
    )


def saturation_figure(states: Sequence[ModelState]) -> ReportFigure:
    """Draw relative entropy and largest logit over the attention layers, a column per probe correlation."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots(2, len(CORRELATIONS), sharex=True, sharey="row", squeeze=False)
        for column, correlation in enumerate(CORRELATIONS):
            for color, state in zip(_colors(len(states)), states, strict=True):
                rows = [value for (_, rho), value in state.saturations.items() if rho == correlation]
                style = dict(color=color, **(_WITH if state.conditioned else _WITHOUT))
                axes[0, column].plot(range(len(rows)), [row.relative_entropy for row in rows], **style)
                axes[1, column].semilogy(range(len(rows)), [row.largest_logit for row in rows], **style)
            _layer_axis(axes[1, column], len(rows), "")
            axes[0, column].set_title(f"correlation {correlation:g}")
            axes[0, column].set_ylim(-0.03, 1.03)
            axes[0, column].grid(True, which="major")
        axes[0, 0].set_ylabel("entropy / uniform")
        axes[1, 0].set_ylabel("largest |logit|")
        _whole_decades(axes[1])
        handles = [
            Line2D([], [], color=color, label=state.label, **(_WITH if state.conditioned else _WITHOUT))
            for color, state in zip(_colors(len(states)), states, strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)

    lowest = "; ".join(
        f"{state.label}: lowest {min(row.relative_entropy for row in state.saturations.values()):.2f}"
        for state in states
    )
    return _render(
        draw,
        (WIDTH, 4.6 + 0.15 * len(states)),
        f"Entropy of attention relative to uniform attention over the layers. {lowest}.",
        "Above: entropy of the attention rows, 1 for uniform and 0 for one-hot attention. "
        "Below: largest absolute logit, on a logarithmic axis. One column for each correlation of the probe tokens.",
    )


def history_figure(histories: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> ReportFigure:
    """Draw what a run logged of the condition numbers, a panel per run.

    Args:
        histories: By run, then by name of a series: its steps and values.
    """

    names = list(dict.fromkeys(name for series in histories.values() for name in series))
    styles = {
        name: dict(color=COLORS[list(ROLES).index(name[0])], **(_WITH if name.endswith("W + C") else _WITHOUT))
        for name in names
    }

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(histories), sharey=True, squeeze=False)[0]
        for axis, (run, series) in zip(axes, histories.items(), strict=True):
            for name, points in series.items():
                axis.semilogy(*zip(*points, strict=True), **styles[name])
            axis.set_title(run)
            axis.set_xlabel("iteration")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(True, which="major")
        axes[0].set_ylabel("largest condition number")
        _whole_decades(axes)
        handles = [Line2D([], [], label=name, **styles[name]) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)

    return _render(
        draw,
        (WIDTH, 4.0),
        "Largest condition number over the layers during training, for " + ", ".join(histories) + ".",
        "Largest condition number over the measured layers during training, on a logarithmic axis, "
        "as the ConditioningHook logged it; W + C over the layers with a correction.",
    )


def _render(draw: Callable[[Figure], None], size: tuple[float, float], alt: str, caption: str) -> ReportFigure:
    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings = dict.fromkeys(colors, INK)
    # Text as outlines looks the same everywhere; a fixed salt gives equal files for equal data.
    settings.update({"grid.color": GRID, "grid.linewidth": 0.6, "svg.fonttype": "path", "svg.hashsalt": "mmspectral"})
    settings.update({"axes.facecolor": "none", "figure.facecolor": "none", "font.size": 10})
    with rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    light = buffer.getvalue()
    dark = re.sub("#[0-9a-f]{6}", lambda color: DARK.get(color[0], color[0]), light)
    return ReportFigure(_data_uri(light), _data_uri(dark), alt, caption)


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _roles(states: Sequence[ModelState]) -> list[str]:
    return [role for role in ROLES if any(row.role == role for state in states for row in state.spectra)]


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _spoken(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def _ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, math.ceil(count / MAX_TICKS))))


def _layer_axis(axis, count: int, title: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("layer")
    axis.set_xticks(_ticks(count))
    axis.grid(True, which="major")


def _whole_decades(axes: np.ndarray) -> None:
    """Let logarithmic axes begin and end at powers of ten, so that there are at least two labelled ticks."""
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    for axis in axes:
        axis.yaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure, states: Sequence[ModelState]) -> None:
    handles = []
    for color, state in zip(_colors(len(states)), states, strict=True):
        handles.append(Line2D([], [], color=color, label=f"W, {state.label}", **_WITHOUT))
        if state.conditioned:
            handles.append(Line2D([], [], color=color, label=f"W + C, {state.label}", **_WITH))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


def _thinned(sigma: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return positions in [0, 1] and values of at most :data:`SPECTRUM_POINTS` singular values; zeros have no point."""
    count = len(sigma)
    chosen = np.unique(np.linspace(0, count - 1, min(count, SPECTRUM_POINTS)).round().astype(int))
    values = sigma.cpu().numpy()[chosen]
    return chosen / max(count - 1, 1), np.where(values > 0, values, np.nan)


def _cut(shades, span: Normalize, count: int):
    """Return the part of a colour map that the layers use."""
    return ListedColormap([shades(span(x)) for x in np.linspace(0, max(count - 1, 1), 64)])

"""Tables and a plot of the study that replaces the attention of a trained softmax ViT."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mmspectral.analysis.attention_swap import KERNELS, REGIMES, SwapRow

STAGES = {"replaced": "replaced, not trained", "first_epoch": "after 1 epoch", "final": "after fine-tuning"}
COLORS = dict(zip(KERNELS, ("#000000", "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#cc79a7", "#888888"), strict=True))


def markdown_tables(rows: Sequence[SwapRow]) -> str:
    """Return one table per regime of the grid, and one of the sweep: accuracy in percent, mean and range over seeds."""
    parts = []
    for regime in REGIMES:
        found = [row for row in rows if row.study == "grid" and row.regime == regime]
        lines = [f"| kernel ({regime}) | m | {' | '.join(STAGES.values())} | seeds |", "|---|---|---|---|---|---|"]
        for (kernel, m), group in _grouped(found, "kernel", "num_features"):
            cells = [_spread([getattr(row, stage) for row in group]) for stage in STAGES]
            lines.append(f"| {kernel} | {'-' if m is None else m} | {' | '.join(cells)} | {len(group)} |")
        if found:
            parts.append("\n".join(lines))
    sweep = [row for row in rows if row.study == "sweep"]
    if sweep:
        lines = [
            "| kernel (sweep) | learning rate | after fine-tuning | spikes | diverged | runs |",
            "|---|---|---|---|---|---|",
        ]
        for (kernel, lr), group in _grouped(sweep, "kernel", "lr"):
            accuracy = _spread([row.final for row in group])
            spikes, lost = sum(row.spikes for row in group), sum(row.diverged for row in group)
            lines.append(f"| {kernel} | {lr:g} | {accuracy} | {spikes} | {lost} | {len(group)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot_rows(rows: Sequence[SwapRow], path: str | Path) -> None:
    """Write an SVG file: accuracy over m by regime and stage, and over the learning rate of the sweep.

    Points are means over seeds, bars the range; runs whose loss was no longer finite are left out.
    """
    grid = {regime: [row for row in rows if row.study == "grid" and row.regime == regime] for regime in REGIMES}
    sweep = [row for row in rows if row.study == "sweep"]
    # Text as outlines looks the same everywhere; a fixed salt gives equal files for equal data.
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "mmspectral", "font.size": 9}):
        figure = Figure(figsize=(10.5, 6.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(2, 3)
        _panel(axes[0, 0], grid["full"], "num_features", "replaced")
        for axis, (regime, stage) in zip(
            axes.flat[1:5], itertools.product(REGIMES, ("first_epoch", "final")), strict=True
        ):
            _panel(axis, grid[regime], "num_features", stage, f"{regime}: ")
        _panel(axes[1, 2], sweep, "lr", "final", "full, not clipped: ")
        figure.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(KERNELS), frameon=False
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axis: Axes, rows: Sequence[SwapRow], name: str, stage: str, prefix: str = "") -> None:
    for kernel, color in COLORS.items():
        groups = _grouped([row for row in rows if row.kernel == kernel and getattr(row, stage) is not None], name)
        if not groups:
            continue
        values = [[100 * getattr(row, stage) for row in group] for _, group in groups]
        means = [statistics.fmean(each) for each in values]
        if groups[0][0] == (None,):
            axis.axhline(means[0], color=color, label=kernel, linewidth=1, linestyle="--")
            continue
        reach = [
            [mean - min(each) for mean, each in zip(means, values, strict=True)],
            [max(each) - mean for mean, each in zip(means, values, strict=True)],
        ]
        positions = [position for (position,), _ in groups]
        axis.errorbar(positions, means, reach, color=color, label=kernel, marker="o", markersize=3, capsize=2)
    ticks = sorted({getattr(row, name) for row in rows} - {None})
    label = {"num_features": "features m", "lr": "learning rate"}[name]
    axis.set(title=prefix + STAGES[stage], xscale="log", xlabel=label, ylabel="accuracy, %")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _grouped(rows: Sequence[SwapRow], *names: str) -> list[tuple[tuple, list[SwapRow]]]:
    """Return the rows that agree in ``names`` together, in the order of KERNELS and then of the values."""
    groups: dict[tuple, list[SwapRow]] = {}
    for row in sorted(rows, key=lambda row: (list(KERNELS).index(row.kernel), row.num_features or 0, row.lr)):
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(groups.items())


def _spread(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{statistics.fmean(known):.1f} ({min(known):.1f} to {max(known):.1f})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} lost"

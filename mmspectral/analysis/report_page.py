"""The conditioning report as one HTML file: a verdict, figures by matplotlib as inline SVG, tables, by jinja2."""

import base64
import io
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined

from mmspectral.analysis.conditioning_report import CORRELATIONS, ModelState, ReportData, RunLog
from mmspectral.analysis.jacobian import JacobianSettings
from mmspectral.analysis.projections import ProjectionCondition

ROLES = {"q": "query", "k": "key", "v": "value"}
KINDS = {"without": "W", "with": "W + C"}
# Okabe and Ito's colours, which people with colour-blindness tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
W, W_PLUS_C = dict(ls="--", marker="o", ms=4, mfc="none"), dict(ls="-", marker="s", ms=4)
TABLE_CORRELATION = 0.5
ONE_HOT = 0.05  # share of the entropy of uniform attention
NOISE = 0.005  # of AP and accuracy: what one run may differ from another by
METRICS = {"coco/bbox_mAP": "box AP", "coco/segm_mAP": "mask AP", "accuracy/top1": "top-1 accuracy"}
GRADES = {"good": "✓ good", "even": "≈ equal", "bad": "✗ not good", "unknown": "? not known"}
HOOK = "custom_hooks=[dict(type='mmspectral.ConditioningHook', interval=100)]"


class Finding(NamedTuple):
    """One line of the verdict: what was compared, both values, a key of ``GRADES``, and what follows in a sentence."""

    topic: str
    ours: str
    twin: str
    grade: str
    meaning: str


@dataclass
class _Section:
    title: str
    paragraphs: list[str]
    figures: list[tuple[str, str]] = field(default_factory=list)  # data URI, caption
    tables: list[tuple] = field(default_factory=list)  # caption, header, rows
    folded: bool = False


def render_report(data: ReportData) -> str:
    """Return the report as HTML: styles inline, pictures in data URIs, no script."""
    findings = verdict(data)
    sections = [_glance(data.states), _kappa(data.states), _training(data.logs), _saturation(data.states)]
    sections.append(_spectra(data.states))
    if data.jacobian:
        sections.append(_jacobian(data.states, data.jacobian))
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(PAGE)
    page = dict(title=data.title, facts=data.facts, headline=_headline(findings), findings=findings, grades=GRADES)
    return template.render(sections=sections, **page) + "\n"


def verdict(data: ReportData) -> list[Finding]:
    """Compare the last state of the model with that of its stock twin, and their runs where both have a log."""
    ours = [state for state in data.states if not state.stock][-1]
    twin = [state for state in data.states if state.stock][-1]
    return [_kappa_finding(ours, twin), _entropy_finding(ours, twin), *_run_findings(data.logs)]


def format_number(value: float | None) -> str:
    """Return three significant digits: 0.0123, 4.56, 789, 12,300, then powers of ten; infinite as rank-deficient."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite" if math.isnan(value) else "rank-deficient"
    mantissa, exponent = f"{value:.2e}".split("e")
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return f"{float(f'{value:.2e}'):,.{max(2 - int(exponent), 0)}f}"


def _kappa_finding(ours: ModelState, twin: ModelState) -> Finding:
    pairs = [(a, b.kappa_without) for a, b in zip(ours.spectra, twin.spectra, strict=True) if a.with_ is not None]
    topic = "Condition number κ of what the layers multiply by (largest)"
    if not pairs:
        return Finding(topic, "–", "–", "unknown", "No projection of this model has a correction on its weight.")
    with_, without = (_largest(getattr(a, name) for a, _ in pairs) for name in ("kappa_with", "kappa_without"))
    stock = _largest(b for _, b in pairs)
    grade = "good" if with_ < 0.9 * stock else "bad" if not with_ <= 1.1 * stock else "even"
    word = {"good": "better than", "bad": "worse than", "even": "as well or badly as"}[grade]
    return Finding(
        topic,
        f"{format_number(with_)} (W + C, {ours.label}); its W alone {format_number(without)}",
        f"{format_number(stock)} (W, {twin.label.removeprefix('stock twin, ')})",
        grade,
        f"The projections are conditioned {word} those of the stock twin.",
    )


def _entropy_finding(ours: ModelState, twin: ModelState) -> Finding:
    topic = "Entropy of attention on probe tokens, 1 uniform, 0 one-hot (lowest)"
    lowest = [min((s.relative_entropy for s in _table_saturations(state)), default=None) for state in (ours, twin)]
    cells = [format_number(value) for value in lowest]
    if None in lowest:
        return Finding(topic, *cells, "unknown", "The attention layers do not give their logits.")
    if lowest[0] < ONE_HOT:
        return Finding(topic, *cells, "bad", "Attention is nearly one-hot, which mostly trains badly: lower the scale.")
    if lowest[0] < lowest[1] / 2:
        return Finding(topic, *cells, "bad", "Attention is much closer to one-hot than that of the stock twin.")
    return Finding(topic, *cells, "good", "Attention is spread over the tokens.")


def _run_findings(logs: Mapping[str, RunLog]) -> list[Finding]:
    curves = [logs[name].curves if name in logs else {} for name in ("conditioned", "stock twin")]
    metrics = dict.fromkeys(name for each in curves for name in each if name not in ("loss", "gradient norm"))
    topics = {"gradient norm": "Gradient of W (median norm, last logged)", "loss": "Training loss (last logged)"}
    topics |= {name: f"{METRICS.get(name, name)} (last validation)" for name in metrics or ["AP or accuracy"]}
    findings = []
    for name, topic in topics.items():
        ends = [each[name][-1][1] if each.get(name) else None for each in curves]
        cells = [format_number(value) if value is not None else "not logged" for value in ends]
        if None in ends:
            hint = f"train with {HOOK}" if name == "gradient norm" else "pass the folder of each run"
            findings.append(Finding(topic, *cells, "unknown", f"Nothing to compare: {hint}."))
            continue
        ratio = ends[0] / ends[1] if ends[1] else math.inf
        text = f"{format_number(ratio)} times that of the stock twin."
        if name == "gradient norm":
            grade = "even" if 1 / 3 < ratio < 3 else "bad"
        elif name == "loss":
            grade = "good" if ratio < 0.95 else "even" if ratio <= 1.05 else "bad"
        else:
            gap = ends[0] - ends[1]
            points = NOISE * (100 if max(ends) > 1 else 1)  # mmpretrain's accuracy is in percent
            grade = "good" if gap > points else "even" if gap >= -points else "bad"
            text = f"{gap:+.3f} against the stock twin, one run each: repeat over seeds before believing it."
        findings.append(Finding(topic, *cells, grade, text))
    return findings


def _headline(findings: Sequence[Finding]) -> str:
    kappa, entropy = findings[:2]
    metrics = [f for f in findings[4:] if f.grade != "unknown"]
    text = kappa.meaning.removesuffix(".")
    if entropy.grade == "bad":
        text += f", but: {entropy.meaning[0].lower()}{entropy.meaning[1:].removesuffix('.')}"
    if not metrics:
        return f"{text}. Whether it trains better is not known: no result of both runs was given."
    words = {"good": "higher", "bad": "lower", "even": "about equal"}
    results = (f"{f.topic.partition(' (')[0]} {words[f.grade]} ({f.ours} / {f.twin})" for f in metrics)
    return f"{text}. Results: {', '.join(results)}."


def _table_saturations(state: ModelState) -> list:
    return [found for (_, rho), found in state.saturations.items() if rho == TABLE_CORRELATION]


def _glance(states: Sequence[ModelState]) -> _Section:
    rows = []
    for state in states:
        row = [state.label]
        for role in ROLES:
            chosen = [r for r in state.spectra if r.role == role]
            row += [format_number(_largest(getattr(r, f"kappa_{kind}") for r in chosen)) for kind in KINDS]
        measured = _table_saturations(state)
        row.append(format_number(min((s.relative_entropy for s in measured), default=None)))
        row.append(format_number(_largest(s.largest_logit for s in measured)))
        rows.append(row)
    kinds = [f"κ({kind})" for role in ROLES for kind in (f"W{role}", f"W{role} + C")]
    header = ["State", *kinds, "lowest entropy", "largest |logit|"]
    text = (
        "κ = σ_max / σ_min is the condition number of a projection weight, without (W) and with (W + C) correction; "
        "the worst layer counts. Entropy is relative to uniform attention, on layer-normalised Gaussian tokens of "
        f"correlation {TABLE_CORRELATION:g}. A dash means that the model has no such matrix or layer."
    )
    return _Section("Every state at a glance", [text], tables=[("Worst values by state", header, rows)])


def _kappa(states: Sequence[ModelState]) -> _Section:
    columns = {
        f"{KINDS[kind]}, {state.label}": [format_number(getattr(row, f"kappa_{kind}")) for row in state.spectra]
        for state in states
        for kind in KINDS
        if kind == "without" or state.conditioned
    }
    cells = zip(states[0].spectra, *columns.values(), strict=True)
    rows = [[f"{row.layer}, {row.role}", *numbers] for row, *numbers in cells]
    text = (
        "Measured in float64 on the matrix that the scope of the correction is about: the whole projection of a layer, "
        "or its worst head for scope 'head'. A matrix with σ_min at rounding level is rank-deficient and has no point."
    )
    caption = (
        "Condition number of each projection over the layers, the first on the left; W dashed, W + C solid. "
        "A model and its twin start from the same W."
    )
    spectra = {state.label: state.spectra for state in states}
    picture = _svg(lambda figure: _draw_kappa(figure, spectra), 3.2 + 0.2 * len(states))
    table = ("Condition number of every projection", ["Layer, role", *columns], rows)
    return _Section("Condition numbers by layer", [text], [(picture, caption)], [table])


def plot_projection_conditions(rows: Sequence[ProjectionCondition], path: str, title: str = "") -> None:
    """Draw one panel per role: kappa over the layers, without and with the correction, on a log axis.

    ``rows`` are those of :func:`mmspectral.analysis.projection_conditions`, at least one; the suffix of
    the path chooses the format.
    """
    if not rows:
        raise ValueError("the model has no conditioned projection: build it with a `conditioning` dict.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    _draw_kappa(figure, {"": rows})
    figure.axes[0].legend()
    figure.suptitle(_plain(title))
    figure.savefig(path, dpi=120)


def _draw_kappa(figure, spectra: Mapping[str, Sequence[ProjectionCondition]]) -> None:
    """Draw kappa over the layers of each named model, a panel per role."""
    for axis, role in _role_axes(figure, spectra.values()):
        for color, (name, rows) in _colored(spectra.items()):
            for kind, style in (("without", W), ("with", W_PLUS_C)):
                values = [getattr(row, f"kappa_{kind}") for row in rows if row.role == role]
                if any(value is not None for value in values):
                    values = [math.nan if value is None or math.isinf(value) else value for value in values]
                    label = _plain(", ".join(filter(None, (KINDS[kind], name))))
                    axis.plot(range(len(values)), values, color=color, label=label, **style)
        axis.set(xlabel="layer", yscale="log")
    figure.axes[0].set_ylabel("condition number κ")


def _training(logs: Mapping[str, RunLog]) -> _Section:
    paragraphs = [f"{name}: {log.folder}" for name, log in logs.items()]
    if not logs:
        paragraphs = ["No folder of a run was given, so there is nothing to show from training; see --work-dir."]
    missing = [name for name, log in logs.items() if not log.kappa]
    if missing:
        paragraphs.append(f"Condition numbers were not logged by {', '.join(missing)}: train with {HOOK}.")
    panels: dict[str, list] = {}  # title -> points and style of each line
    kappas, worst = [], "largest κ"
    for color, (run, log) in _colored(logs.items()):
        for name, curve in log.curves.items():
            panels.setdefault(name, []).append((curve, dict(color=color, label=run, marker=".")))
        for kind, style in (("W", W), ("W + C", W_PLUS_C)):
            points = sorted(point for name, curve in log.kappa.items() if name[3:] == kind for point in curve)
            if points:  # of those of a step the last is the largest
                kappas.append((dict(points).items(), dict(color=color, label=f"{kind}, {run}", **style)))
    names = ", ".join(panels)
    if kappas:
        panels[worst] = kappas
    if not panels:
        return _Section("Over training", paragraphs)
    rows, columns = math.ceil(len(panels) / 3), min(3, len(panels))

    def draw(figure) -> None:
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis, (name, lines) in zip(axes, panels.items(), strict=False):
            for points, style in lines:
                axis.plot(*zip(*points, strict=True), **style)
            unit = "iteration" if name in ("loss", "gradient norm", worst) else "epoch or iteration of the validation"
            axis.set(title=_plain(METRICS.get(name, name)), xlabel=unit, yscale="log" if name == worst else "linear")
        for axis in axes[len(panels) :]:
            axis.remove()

    picture = _svg(draw, 3.2 * rows)
    return _Section("Over training", paragraphs, [(picture, f"As logged by the runs: {names}.")])


def _saturation(states: Sequence[ModelState]) -> _Section:
    measured = [state for state in states if state.saturations]
    if not measured:
        text = "None of the model's attention layers gives its logits (attention_logits), so none could be measured."
        return _Section("How one-hot attention is", [text])

    def draw(figure) -> None:
        axes = figure.subplots(2, len(CORRELATIONS), sharex=True, sharey="row", squeeze=False)
        for (above, below), correlation in zip(axes.T, CORRELATIONS, strict=True):
            for color, state in _colored(measured):
                rows = [value for (_, rho), value in state.saturations.items() if rho == correlation]
                style = dict(color=color, label=_plain(state.label), **(W_PLUS_C if state.conditioned else W))
                above.plot([row.relative_entropy for row in rows], **style)
                below.plot([row.largest_logit for row in rows], **style)
            above.set(title=f"correlation {correlation:g}", ylim=(-0.03, 1.03))
            below.set(xlabel="layer", yscale="log")
        axes[0, 0].set_ylabel("entropy / uniform")
        axes[1, 0].set_ylabel("largest |logit|")

    text = (
        "Each attention layer alone is fed with layer-normalised Gaussian tokens that share part of their content. "
        "Entropy near 0 is one-hot attention, whose gradients vanish or explode. Tokens of an image are correlated in "
        "other ways: this compares states and says less about a trained network in use."
    )
    caption = "Above: entropy of the rows of attention, 1 uniform, 0 one-hot. Below: largest logit. Over the layers."
    picture = _svg(draw, 4.6 + 0.2 * len(states))
    return _Section("How one-hot attention is", [text], [(picture, caption)])


def _spectra(states: Sequence[ModelState]) -> _Section:
    from matplotlib import colormaps

    figures = []
    for state in states:

        def draw(figure, state=state) -> None:
            for axis, role in _role_axes(figure, [state.spectra]):
                chosen = [row for row in state.spectra if row.role == role]
                for i, row in enumerate(chosen):
                    color = colormaps["viridis"](0.85 * i / max(len(chosen) - 1, 1))
                    label = {0: "first layer", len(chosen) - 1: "last layer"}.get(i)
                    for found, options in ((row.without, dict(ls="--", label=label)), (row.with_, dict(ls="-"))):
                        if found is not None:
                            sigma = found.sigma.masked_fill(found.sigma <= 0, math.nan).tolist()
                            axis.plot(np.linspace(0, 1, len(sigma)), sigma, color=color, lw=1.2, **options)
                axis.set(xlabel="rank of the singular value (share)", yscale="log")
            figure.axes[0].set_ylabel("singular value")

        kinds = "W (dashed) and W + C (solid)" if state.conditioned else "W (no correction)"
        figures.append((_svg(draw, 3.4), f"Singular values, largest first, {state.label}: {kinds}."))
    text = "A condition number is the ratio of the two ends of a curve; dark is the first layer, light the last."
    return _Section("Spectra", [text], figures, folded=True)


def _jacobian(states: Sequence[ModelState], settings: JacobianSettings) -> _Section:
    jacobians = {f"{state.label}, {kind}": found for state in states for kind, found in state.jacobians.items()}
    first = next(iter(jacobians.values()))
    crossed = first.cross_covariance is not None
    header = ["State, matrix", "κ(J)", "rank of J", "bound", "κ(X)", "κ(Λ)", "κ(Wq)", "κ(Wk)", "κ(Wv)", "κ(S)"]
    exceeded = [label for label, found in jacobians.items() if found.condition.kappa > found.bound.effective]
    paragraphs = [
        "J is the derivative of A(X) = softmax(X Wq Wkᵀ Xᵀ / √d) X Wv by Wq, Wk and Wv, in closed form (arXiv "
        f"2603.07162, Theorem 3.3), for the first head of {settings.layer}: {settings.num_tokens} probe tokens of "
        f"correlation {settings.correlation:g}, {first.dims} dimensions of the head, float64, without bias, mask and "
        "position bias. For a layer that attends in another way the numbers are those of dot-product attention.",
        "The bound is that of Theorem 3.4, κ(X)³ κ(Λ) κ(Wv) (κ(Wq) + κ(Wk)) + κ(X) κ(S) with Λ the derivative and S "
        "the output of the softmax. Taken literally it is void: Λ is always singular (a constant added to a row of "
        "logits changes nothing). All κ here are over the non-zero singular values, which makes the number finite but "
        "no theorem: it may be close, far too large, or too small.",
        f"Here κ(J) exceeds it for: {'; '.join(exceeded)}." if exceeded else "Here κ(J) stays below it in every row.",
    ]
    if crossed:
        header.insert(3, "κ(J) of the layer")
        paragraphs.append(
            "This layer computes cross-covariance attention, which the theorems are not about: 'κ(J) of the layer' is "
            "that of its own head, by automatic differentiation."
        )
    rows = []
    for label, found in jacobians.items():
        bound, J = found.bound, found.condition
        factors = (bound.tokens, bound.softmax_derivative, bound.query, bound.key, bound.value, bound.softmax)
        numbers = [J.kappa, *([found.cross_covariance.kappa] if crossed else []), bound.effective]
        kappa, *others = map(format_number, [*numbers, *(factor.kappa for factor in factors)])
        rows.append([label, kappa, f"{J.rank:,} of {J.full_rank:,}", *others])
    table = ("Condition of the parameter Jacobian and the factors of its bound", header, rows)
    return _Section("Jacobian and its bound", paragraphs, tables=[table], folded=True)


def _svg(draw: Callable, height: float) -> str:
    """Return a figure as a data URI, with one legend for all panels below them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text as outlines looks the same everywhere; a fixed salt gives equal files for equal data.
    fixed = {"svg.fonttype": "path", "svg.hashsalt": "mmspectral", "font.size": 10}
    with rc_context({**fixed, "axes.grid": True, "grid.alpha": 0.4}):
        figure = Figure(figsize=(9.9, height), layout="constrained")
        draw(figure)
        handles = {}
        for axis in figure.axes:
            handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _role_axes(figure, models: Iterable[Sequence[ProjectionCondition]]) -> list:
    roles = [role for role in ROLES if any(row.role == role for rows in models for row in rows)]
    axes = figure.subplots(1, len(roles), sharey=True, squeeze=False)[0]
    for axis, role in zip(axes, roles, strict=True):
        axis.set_title(f"{ROLES[role]} projection")
        axis.grid(alpha=0.4)
        axis.xaxis.get_major_locator().set_params(integer=True)
    return list(zip(axes, roles, strict=True))


def _colored(items) -> Iterable[tuple]:
    return zip(itertools.cycle(COLORS), items)


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the largest number, NaN if one is, None if there is none."""
    known = [value for value in values if value is not None]
    return next(filter(math.isnan, known), max(known, default=None))


def _plain(name: str) -> str:
    """Return a name as matplotlib shows it literally: no formula between dollars, not hidden from the legend."""
    return f" {name}".replace("$", r"\$") if name.startswith("_") else name.replace("$", r"\$")


PAGE = """
{% macro grid(caption, header, rows) %}
<div class="scroll" tabindex="0" role="group" aria-label="Table: {{ caption }}"><table>
<caption>{{ caption }}</caption>
<thead><tr>{% for text in header %}<th scope="col">{{ text }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 2vw 3rem; max-width: 72rem; color: #1f2328; font: 1rem/1.55 sans-serif; }
h1, p, dd, tbody th { overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; }
p { max-width: 52rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; }
dt, figcaption, caption { color: #57606a; } dd { margin: 0; }
figure { margin: 1rem 0; } img { display: block; width: 100%; min-width: 36rem; height: auto; }
.scroll { overflow-x: auto; border: 1px solid #d0d7de; border-radius: 6px; padding: 0.25rem; }
figcaption, caption { text-align: left; padding: 0.4rem 0.1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.3rem 0.5rem; border-top: 1px solid #d0d7de; text-align: right; }
th[scope=row], .verdict td, .verdict th { text-align: left; vertical-align: top; } tbody th { font-weight: 400; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
.headline { font-size: 1.1rem; font-weight: 600; }
.grade { white-space: nowrap; font-weight: 600; border-radius: 1rem; padding: 0.1rem 0.6rem; }
.good { background: #dafbe1; color: #116329; } .bad { background: #ffebe9; color: #a40e26; }
.even { background: #ddf4ff; color: #0550ae; } .unknown { background: #eaeef2; color: #424a53; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<section>
<h2>Verdict</h2>
<p class="headline">{{ headline }}</p>
<div class="scroll verdict"><table>
<thead><tr>{% for text in ("", "Compared", "This model", "Stock twin", "What it means") %}
<th scope="col">{{ text }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in findings %}
<tr><td><span class="grade {{ row.grade }}">{{ grades[row.grade] }}</span></td><th scope="row">{{ row.topic }}</th>
<td>{{ row.ours }}</td><td>{{ row.twin }}</td><td>{{ row.meaning }}</td></tr>
{% endfor %}
</tbody></table></div>
<dl>{% for name, value in facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
</section>
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% if section.folded %}<details><summary>Show</summary>{% endif %}
{% for text in section.paragraphs %}
<p>{{ text }}</p>
{% endfor %}
{% for source, caption in section.figures %}
<figure><div class="scroll"><img src="{{ source }}" alt="{{ caption }}"></div>
<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
{% for table in section.tables %}
{% if table[2] | length > 8 %}
<details><summary>Table: {{ table[0] }}</summary>{{ grid(*table) }}</details>
{% else %}
{{ grid(*table) }}
{% endif %}
{% endfor %}
{% if section.folded %}</details>{% endif %}
</section>
{% endfor %}
</main>
</body>
</html>
"""

"""Put the measurements of the conditioning report into one HTML file that needs no network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mmspectral.analysis.conditioning_history import History
from mmspectral.analysis.jacobian import HeadJacobian, JacobianSettings
from mmspectral.analysis.model_states import ModelState
from mmspectral.analysis.report_figures import (
    ROLES,
    ReportFigure,
    history_figure,
    kappa_figure,
    saturation_figure,
    spectra_figure,
)
from mmspectral.analysis.report_template import PAGE, STYLE

TABLE_CORRELATION = 0.5
RANK_DEFICIENT = "rank-deficient"


@dataclass(frozen=True)
class ReportData:
    """What goes into a report.

    Args:
        title: Heading of the page.
        facts: Names and values for the head of the page.
        states: States of the conditioned model, then of its stock twin.
        histories: What the runs logged, by the name of the run.
        jacobian: Settings of the Jacobian section; None leaves it out.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    states: Sequence[ModelState]
    histories: Mapping[str, History]
    jacobian: JacobianSettings | None


@dataclass
class _Table:
    caption: str
    header: list
    rows: list[list]
    groups: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class _Section:
    anchor: str
    title: str
    paragraphs: list
    figures: list[ReportFigure] = field(default_factory=list)
    tables: list[_Table] = field(default_factory=list)


def render_report(data: ReportData) -> str:
    """Return the report as HTML: styles inline, pictures in data URIs, no script."""
    sections = [_summary(data.states), _kappa(data.states), _spectra(data.states), _training(data.histories)]
    sections.append(_saturation(data.states))
    if data.jacobian:
        sections.append(_jacobian(data.states, data.jacobian))
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)
    return template.render(title=data.title, facts=data.facts, sections=sections, style=Markup(STYLE)) + "\n"


def format_number(value: float | None) -> str | Markup:
    """Return three significant digits: 0.0123, 4.56, 789, 12,300, then powers of ten; infinite as rank-deficient."""
    if value is None:
        return Markup("&ndash;")
    if not math.isfinite(value):
        return RANK_DEFICIENT
    mantissa, exponent = f"{value:.2e}".split("e")
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return Markup("{} &times; 10<sup>{}</sup>").format(mantissa, Markup(str(int(exponent)).replace("-", "&minus;")))
    return f"{float(f'{value:.2e}'):,.{max(2 - int(exponent), 0)}f}"


def _summary(states: Sequence[ModelState]) -> _Section:
    rows = []
    for state in states:
        row: list = [state.label]
        for role in ROLES:
            chosen = [r for r in state.spectra if r.role == role]
            row.append(format_number(max((r.kappa_without for r in chosen), default=None)))
            row.append(format_number(max((r.kappa_with for r in chosen if r.kappa_with is not None), default=None)))
        measured = [s for (_, rho), s in state.saturations.items() if rho == TABLE_CORRELATION]
        row.append(format_number(min((s.relative_entropy for s in measured), default=None)))
        row.append(format_number(max((s.largest_logit for s in measured), default=None)))
        rows.append(row)
    header = ["State", *["W", "W + C"] * len(ROLES), "lowest entropy", "largest |logit|"]
    groups = [("", 1), *[(f"largest κ, {name}", 2) for name in ROLES.values()], ("attention on probe tokens", 2)]
    return _Section(
        "summary",
        "At a glance",
        [
            "κ = σ_max / σ_min is the condition number of a projection weight, without (W) and with (W + C) its "
            "correction; the worst layer counts. Entropy is relative to uniform attention (1 is uniform, 0 one-hot), "
            f"on layer-normalised Gaussian probe tokens of correlation {TABLE_CORRELATION:g}; the lowest counts. "
            "A dash means that the model has no such matrix or layer.",
        ],
        tables=[_Table("Largest condition numbers and attention of each state", header, rows, groups)],
    )


def _kappa(states: Sequence[ModelState]) -> _Section:
    header, groups = ["Layer, role"], [("", 1)]
    for state in states:
        header += ["W", "W + C"] if state.conditioned else ["W"]
        groups.append((state.label, 2 if state.conditioned else 1))
    rows = []
    for aligned in zip(*(state.spectra for state in states), strict=True):
        row: list = [Markup("<code>{}</code>, {}").format(aligned[0].layer, aligned[0].role)]
        for state, spectrum in zip(states, aligned, strict=True):
            row.append(format_number(spectrum.kappa_without))
            if state.conditioned:
                row.append(format_number(spectrum.kappa_with))
        rows.append(row)
    return _Section(
        "kappa",
        "Condition numbers by layer",
        [
            "Measured in float64 on the matrix that the correction's scope is about: the whole projection of a layer, "
            "or its worst head for scope 'head'. A matrix with σ_min at rounding level has no condition number and is "
            f"called {RANK_DEFICIENT}.",
        ],
        [kappa_figure(states)],
        [_Table("Condition number of every projection", header, rows, groups)],
    )


def _spectra(states: Sequence[ModelState]) -> _Section:
    return _Section(
        "spectra",
        "Spectra",
        ["A condition number is the ratio of the two ends of a curve; the colour tells the layer."],
        [spectra_figure(state) for state in states],
    )


def _training(histories: Mapping[str, History]) -> _Section:
    logged = {run: history for run, history in histories.items() if history}
    paragraphs = []
    missing = [run for run in histories if run not in logged]
    if missing:
        paragraphs.append(
            f"Nothing was logged about condition numbers in {', '.join(missing)}: train with "
            "custom_hooks=[dict(type='mmspectral.ConditioningHook', interval=100)] to see them here."
        )
    if not histories:
        paragraphs.append("No run folder was given, so there is nothing to show from training; see --work-dir.")
    return _Section(
        "training", "Over training", paragraphs, [history_figure(logged)] if logged else [], _history_tables(logged)
    )


def _history_tables(logged: Mapping[str, History]) -> list[_Table]:
    rows = []
    for run, history in logged.items():
        for series, points in history.items():
            (first, start), (last, end) = points[0], points[-1]
            rows.append([f"{run}: {series}", f"{first:,}", format_number(start), f"{last:,}", format_number(end)])
    header = ["Run, role and matrix", "first iteration", "κ there", "last iteration", "κ there"]
    return [_Table("Largest condition number at the ends of training", header, rows)] if rows else []


def _saturation(states: Sequence[ModelState]) -> _Section:
    measured = [state for state in states if state.saturations]
    if not measured:
        text = "None of the model's attention layers gives its logits (attention_logits), so none could be measured."
        return _Section("saturation", "Saturation of attention", [text])
    header, groups, rows = ["Layer"], [("", 1)], []
    for state in measured:
        header += ["entropy", "|logit|"]
        groups.append((state.label, 2))
    for layer, correlation in measured[0].saturations:
        if correlation == TABLE_CORRELATION:
            row: list = [Markup("<code>{}</code>").format(layer)]
            for state in measured:
                found = state.saturations.get((layer, correlation))
                row.append(format_number(found and found.relative_entropy))
                row.append(format_number(found and found.largest_logit))
            rows.append(row)
    return _Section(
        "saturation",
        "Saturation of attention",
        [
            "Each attention layer alone is fed with layer-normalised Gaussian tokens that share part of their content. "
            "Entropy near 0 is one-hot attention, whose gradients vanish or explode. Tokens of a real image are "
            "correlated in other ways, so this compares states and says less about a trained network in use.",
        ],
        [saturation_figure(measured)],
        [_Table(f"Entropy and largest logit at correlation {TABLE_CORRELATION:g}", header, rows, groups)],
    )


def _jacobian(states: Sequence[ModelState], settings: JacobianSettings) -> _Section:
    jacobians = {f"{state.label}, {kind}": found for state in states for kind, found in state.jacobians.items()}
    first = next(iter(jacobians.values()))
    crossed = first.cross_covariance is not None
    rows = [[label, *_jacobian_row(found, crossed)] for label, found in jacobians.items()]
    header = ["State, matrix", "κ(J)", "rank of J", "bound", "κ(X)", "κ(Λ)", "κ(Wq)", "κ(Wk)", "κ(Wv)", "κ(S)"]
    exceeded = [label for label, found in jacobians.items() if found.condition.kappa > found.bound.effective]
    paragraphs = [
        Markup(
            "J is the derivative of A(X) = softmax(X Wq Wk<sup>T</sup> X<sup>T</sup> / √d) X Wv by Wq, Wk and Wv, in "
            "closed form (arXiv 2603.07162, Theorem 3.3), for the first head of <code>{}</code>: {} probe tokens of "
            "correlation {}, {} dimensions of the head, float64, without bias, mask and position bias. "
            "For a layer that attends in another way (among channels, or with normalised q and k) the numbers are "
            "those of dot-product attention with its weights."
        ).format(settings.layer, settings.num_tokens, f"{settings.correlation:g}", first.dims),
        "The bound is that of Theorem 3.4, κ(X)³ κ(Λ) κ(Wv) (κ(Wq) + κ(Wk)) + κ(X) κ(S) with Λ the derivative and S "
        "the output of the softmax. Taken literally it is void: Λ is always singular (a constant added to a row of "
        "logits changes nothing), so κ(Λ) is infinite. All κ here are therefore over the non-zero singular values, "
        "which makes the number finite but no theorem: it may be close, far too large, or too small.",
        f"Here κ(J) exceeds it for: {'; '.join(exceeded)}." if exceeded else "Here κ(J) stays below it in every row.",
    ]
    if first.condition.deficient:
        paragraphs.append("J is rank-deficient here, so κ(J) is over its non-zero singular values too.")
    if crossed:
        header.insert(3, "κ(J) of the layer")
        paragraphs.append(
            "This layer computes cross-covariance attention, which the theorems are not about: 'κ(J) of the layer' is "
            "that of its own head, by automatic differentiation; the other columns are those of dot-product attention "
            "with the same weights."
        )
    return _Section(
        "jacobian",
        "Jacobian and its bound",
        paragraphs,
        tables=[_Table("Condition of the parameter Jacobian and the factors of its bound", header, rows)],
    )


def _jacobian_row(found: HeadJacobian, crossed: bool) -> list:
    bound, J = found.bound, found.condition
    factors = (bound.tokens, bound.softmax_derivative, bound.query, bound.key, bound.value, bound.softmax)
    row = [format_number(J.kappa), f"{J.rank:,} of {J.full_rank:,}"]
    if crossed:
        row.append(format_number(found.cross_covariance.kappa))
    return [*row, format_number(bound.effective), *(format_number(factor.kappa) for factor in factors)]

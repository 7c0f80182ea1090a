"""Measurements of a conditioned model beside its stock twin, at initialisation and with trained weights."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.analysis.jacobian import HeadJacobian, JacobianSettings, head_jacobian, xca_temperature
from mmspectral.analysis.projections import AttentionProjection, attention_projections
from mmspectral.analysis.run_logs import Curve, kappa_history, training_curves
from mmspectral.checkpoints import load_backbone
from mmspectral.errors import UsageError
from mmspectral.layers import Saturation, attention_layers, probe_tokens, saturation
from mmspectral.version import __version__

CORRELATIONS = (0.0, 0.5, 0.9)
DEFAULT_PROBE_LENGTH = 196  # 224-pixel images in patches of 16


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Args:
        name: Of its config.
        cfg: Its config.
        checkpoints: Paths or URLs of trained weights, oldest first.
        work_dir: Folder of its run; None takes that of the last checkpoint.
    """

    name: str
    cfg: Config
    checkpoints: Sequence[str] = ()
    work_dir: Path | None = None

    def run_folder(self) -> Path | None:
        """Return the folder of the run, if one is known."""
        local = [checkpoint for checkpoint in self.checkpoints if "://" not in checkpoint]
        return self.work_dir or (Path(local[-1]).expanduser().parent if local else None)


@dataclass(frozen=True)
class ProjectionSpectrum:
    """Singular values of one projection of one layer, largest first.

    Args:
        layer: Module name of the (fused or separate) projection.
        role: ``"q"``, ``"k"`` or ``"v"``.
        without: Of W; for scope ``head`` those of the head with the largest kappa.
        with_: Of W + C likewise; None where the model has no correction.
        kappa_without: kappa(W), infinite for a rank-deficient matrix.
        kappa_with: kappa(W + C), or None.
    """

    layer: str
    role: str
    without: Tensor
    with_: Tensor | None
    kappa_without: float
    kappa_with: float | None


@dataclass(frozen=True)
class ModelState:
    """Everything that the report shows of one state of one model.

    Args:
        label: Name of the state.
        spectra: One for each projection, in module order.
        saturations: By attention layer and probe correlation.
        jacobians: By ``"W"`` and ``"W + C"``; empty if none was asked for.
        stock: Whether the model is the stock twin.
    """

    label: str
    spectra: list[ProjectionSpectrum]
    saturations: dict[tuple[str, float], Saturation]
    jacobians: dict[str, HeadJacobian]
    stock: bool = False

    @property
    def conditioned(self) -> bool:
        """Whether any projection has a correction."""
        return any(row.with_ is not None for row in self.spectra)


@dataclass(frozen=True)
class RunLog:
    """What one run logged: its ``training_curves`` and its ``kappa_history``."""

    folder: Path
    curves: Mapping[str, Curve]
    kappa: Mapping[str, Curve]


@dataclass(frozen=True)
class ReportData:
    """What goes into a report.

    Args:
        title: Heading of the page.
        facts: Names and values for the head of the page.
        states: States of the conditioned model, then of its stock twin.
        logs: Of the runs whose folders are known, by ``"conditioned"`` and ``"stock twin"``.
        jacobian: Settings of the Jacobian section; None leaves it out.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    states: Sequence[ModelState]
    logs: Mapping[str, RunLog]
    jacobian: JacobianSettings | None


def collect_report(
    subject: Subject, twin: Subject | None = None, jacobian: JacobianSettings | None = None, seed: int = 0
) -> ReportData:
    """Measure everything that the report shows.

    Args:
        subject: The conditioned model.
        twin: The model to compare with; None takes the same config without
            conditioning, at initialisation only.
        jacobian: Which Jacobian to take; an empty name of the layer stands for
            the first attention layer, None for no Jacobian.
        seed: Of the initial weights.

    Raises:
        UsageError: A checkpoint does not fit, the twin has another
            architecture, or there is no such layer.
    """
    twin = twin or Subject("the same config with conditioning=None", stock_twin(subject.cfg))
    model = _build(subject, seed)
    scopes = {name: projection.scope for name, projection in attention_projections(model).items()}
    if not scopes:
        raise UsageError(f"The model of {subject.name} has no attention projections that can be found.")
    if jacobian:
        jacobian = _choose_layer(model, jacobian)
    states: list[ModelState] = []
    for one, prefix in ((subject, ""), (twin, "stock twin, ")):
        for checkpoint, label in zip((None, *one.checkpoints), _labels(one.checkpoints), strict=True):
            model = _build(one, seed)
            try:
                if checkpoint:
                    load_backbone(model, checkpoint)
                states.append(measure(model, prefix + label, scopes, jacobian, stock=one is twin))
            except ValueError as error:
                raise UsageError(str(error)) from error
    folders = {"conditioned": subject.run_folder(), "stock twin": twin.run_folder()}
    return ReportData(
        title=f"Conditioning report: {Path(subject.name).stem}",
        facts=[
            ("config", subject.name),
            ("checkpoints", ", ".join(subject.checkpoints) or "none"),
            ("stock twin", ", ".join((twin.name, *twin.checkpoints))),
            ("initial weights", f"drawn from the configs with seed {seed}, not those that a run started from"),
            ("versions", f"mmspectral {__version__}, torch {torch.__version__}"),
        ],
        states=states,
        logs={name: RunLog(path, training_curves(path), kappa_history(path)) for name, path in folders.items() if path},
        jacobian=jacobian,
    )


def build_model(cfg: Config, seed: int) -> nn.Module:
    """Build and initialise the config's model from ``seed``, without mmengine's list of every parameter."""
    torch.manual_seed(seed)
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")), _without_initialisation_log():
        model = MODELS.build(copy.deepcopy(cfg.model))
        model.init_weights()
    return model.eval()


def stock_twin(cfg: Config) -> Config:
    """Return a copy of a config in which nothing of the model is conditioned."""
    twin = copy.deepcopy(cfg)
    twin.model = _without_conditioning(twin.model)
    return twin


@torch.no_grad()
def measure(
    model: nn.Module,
    label: str,
    scopes: Mapping[str, str],
    jacobian: JacobianSettings | None = None,
    stock: bool = False,
) -> ModelState:
    """Measure a model in the state that it is in.

    Args:
        model: The model that the report is about, or its stock twin.
        label: Name of the state.
        scopes: Scope of each projection of the conditioned model by name, so
            that a twin is measured by the same matrices.
        jacobian: Which Jacobian to take, if any.
        stock: Whether this is the twin.

    Raises:
        ValueError: The model lacks one of the projections.
    """
    projections = attention_projections(model)
    missing = [name for name in scopes if name not in projections]
    if missing:
        raise ValueError(
            f"{label}: the model has no attention projection {', '.join(missing[:4])}; the twin must be the same "
            "architecture without conditioning."
        )
    chosen = {name: projections[name] for name in scopes}
    return ModelState(
        label,
        [row for name, projection in chosen.items() for row in _spectra(projection, scopes[name])],
        _saturations(model),
        _jacobians(model, chosen, jacobian) if jacobian else {},
        stock,
    )


def _spectra(projection: AttentionProjection, scope: str) -> Iterator[ProjectionSpectrum]:
    weight, corrected = projection.matrices()
    layout = projection.layout
    without = layout.split(weight, scope)
    with_ = None if corrected is weight else layout.split(corrected, scope)
    for i, role in enumerate(layout.roles):
        sigma, kappa = _worst(without[i])
        corrected_sigma, corrected_kappa = (None, None) if with_ is None else _worst(with_[i])
        yield ProjectionSpectrum(projection.name, role, sigma, corrected_sigma, kappa, corrected_kappa)


def _worst(matrices: Tensor) -> tuple[Tensor, float]:
    """Return singular values and kappa of a matrix, or of the worst of a stack of heads."""
    sigma = ops.singular_values(matrices)
    kappa = ops.condition_number_of(sigma, matrices.shape)
    if kappa.dim():
        worst = kappa.argmax()
        kappa, sigma = kappa[worst], sigma[worst]
    return sigma, kappa.item()


def _saturations(model: nn.Module) -> dict[tuple[str, float], Saturation]:
    lengths = (m.probe_length for m in model.modules() if hasattr(m, "probe_length"))
    num_tokens = next(lengths, DEFAULT_PROBE_LENGTH)
    found = {}
    for name, layer in attention_layers(model).items():
        weight = next(m for m in layer.modules() if isinstance(m, nn.Linear)).weight
        for correlation in CORRELATIONS:
            tokens = probe_tokens(num_tokens, weight.shape[1], correlation).to(weight)
            found[name, correlation] = saturation(layer.attention_logits(tokens))
    return found


def _jacobians(
    model: nn.Module, projections: Mapping[str, AttentionProjection], settings: JacobianSettings
) -> dict[str, HeadJacobian]:
    heads: dict[str, dict[str, Tensor]] = {"W": {}, "W + C": {}}
    for name, projection in projections.items():
        if _parent(name) == settings.layer:
            weight, corrected = projection.matrices()
            for kind, matrix in (("W", weight), ("W + C", corrected)):
                blocks = projection.layout.split(matrix, "head")  # [P, h, d, D]
                heads[kind].update(zip(projection.layout.roles, blocks[:, 0], strict=True))
    temperature = xca_temperature(model.get_submodule(settings.layer))
    same = all(torch.equal(heads["W"][role], heads["W + C"][role]) for role in heads["W"])
    kinds = ("W",) if same else ("W", "W + C")
    return {kind: head_jacobian(heads[kind], settings, temperature) for kind in kinds}


def _build(subject: Subject, seed: int) -> nn.Module:
    try:
        return build_model(subject.cfg, seed)
    except OSError as error:
        raise UsageError(
            f"The initial weights of {subject.name} cannot be read: {error}. "
            "Start from scratch with --cfg-options model.backbone.init_cfg=None."
        ) from error


def _choose_layer(model: nn.Module, settings: JacobianSettings) -> JacobianSettings | None:
    """Fill in the first layer of which q, k and v are known; None if there is none."""
    roles: dict[str, set[str]] = {}
    for name, projection in attention_projections(model).items():
        roles.setdefault(_parent(name), set()).update(projection.layout.roles)
    layers = [layer for layer, found in roles.items() if found == {"q", "k", "v"}]
    if settings.layer and settings.layer not in layers:
        raise UsageError(
            f"The Jacobian cannot be taken of {settings.layer!r}; choose one of {', '.join(layers) or 'no layer'}."
        )
    return replace(settings, layer=settings.layer or layers[0]) if layers else None


def _labels(checkpoints: Sequence[str]) -> list[str]:
    """Name the initial state and each checkpoint, by its file or, where two are alike, by its path."""
    names = [Path(checkpoint).name for checkpoint in checkpoints]
    unique = len(set(names)) == len(names)
    return ["initialisation", *(names if unique else checkpoints)]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _without_conditioning(settings):
    """Set every ``conditioning`` and ``*_conditioning`` in nested settings to None."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            named = key == "conditioning" or str(key).endswith("_conditioning")
            settings[key] = None if named else _without_conditioning(value)
    elif isinstance(settings, Sequence) and not isinstance(settings, str):
        return type(settings)(map(_without_conditioning, settings))
    return settings


@contextmanager
def _without_initialisation_log() -> Iterator[None]:
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

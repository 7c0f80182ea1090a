"""Measurements of a conditioned model beside its stock twin, at initialisation and with trained weights."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from mmspectral.analysis.jacobian import HeadJacobian, JacobianSettings, head_jacobian, xca_temperature
from mmspectral.analysis.projections import (
    AttentionProjection,
    ProjectionCondition,
    attention_projections,
    projection_conditions,
)
from mmspectral.analysis.run_logs import Curve, kappa_history, training_curves
from mmspectral.checkpoints import load_backbone
from mmspectral.errors import UsageError
from mmspectral.layers import Saturation, attention_layers, probe_tokens, saturation
from mmspectral.version import __version__

CORRELATIONS = (0.0, 0.5, 0.9)
DEFAULT_PROBE_LENGTH = 196  # 224-pixel images in patches of 16


@dataclass(frozen=True)
class Subject:
    """A model to measure: its config, and paths or URLs of trained weights, oldest first.

    ``work_dir`` is the folder of its run; None takes that of the last checkpoint.
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
class ModelState:
    """Everything that the report shows of one state of one model.

    Spectra are in module order, saturations by attention layer and probe correlation, Jacobians (if
    asked for) by ``"W"`` and ``"W + C"``; ``stock`` says that the model is the twin.
    """

    label: str
    spectra: list[ProjectionCondition]
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

    States are those of the conditioned model, then of its stock twin; logs are by ``"conditioned"`` and
    ``"stock twin"``; ``jacobian`` None leaves out that section.
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
    left_out: dict[str, str] = {}
    projections = attention_projections(model, left_out)
    reasons = list(left_out.values())
    if not projections:
        reason = reasons[0] if reasons else "None can be found."
        raise UsageError(f"The model of {subject.name} has no attention projections to measure. {reason}")
    if jacobian:
        jacobian = _choose_layer(projections, jacobian)
    states: list[ModelState] = []
    for one, prefix in ((subject, ""), (twin, "stock twin, ")):
        for checkpoint, label in zip((None, *one.checkpoints), _labels(one.checkpoints), strict=True):
            model = _build(one, seed)
            try:
                if checkpoint:
                    load_backbone(model, checkpoint)
                states.append(measure(model, prefix + label, projections, jacobian, stock=one is twin))
            except ValueError as error:
                raise UsageError(f"{prefix}{label}: {error}") from error
    folders = {"conditioned": subject.run_folder(), "stock twin": twin.run_folder()}
    return ReportData(
        title=f"Conditioning report: {Path(subject.name).stem}",
        facts=[
            ("config", subject.name),
            ("checkpoints", ", ".join(subject.checkpoints) or "none"),
            ("stock twin", ", ".join((twin.name, *twin.checkpoints))),
            ("initial weights", f"drawn from the configs with seed {seed}, not those that a run started from"),
            *(("not measured", reason) for reason in reasons),
            ("versions", f"mmspectral {__version__}, torch {torch.__version__}"),
        ],
        states=states,
        logs={name: RunLog(path, training_curves(path), kappa_history(path)) for name, path in folders.items() if path},
        jacobian=jacobian,
    )


def build_model(cfg: Config, seed: int) -> nn.Module:
    """Build and initialise the config's model from ``seed``, without mmengine's list of every parameter."""
    torch.manual_seed(seed)
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
            model = MODELS.build(copy.deepcopy(cfg.model))
            model.init_weights()
    finally:
        logger.setLevel(level)
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
    projections: Mapping[str, AttentionProjection],
    jacobian: JacobianSettings | None = None,
    stock: bool = False,
) -> ModelState:
    """Measure a model in the state that it is in.

    Args:
        model: The model that the report is about, or its stock twin.
        label: Name of the state.
        projections: Those of the model that the report is about.
        jacobian: Which Jacobian to take, if any.
        stock: Whether this is the twin.

    Raises:
        ValueError: The model lacks one of the projections.
    """
    return ModelState(
        label,
        projection_conditions(model, projections),
        _saturations(model),
        _jacobians(model, projections, jacobian) if jacobian else {},
        stock,
    )


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
    for each in _by_layer(projections)[settings.layer]:
        projection = each.of(model)
        for kind, matrix in zip(heads, projection.matrices(), strict=True):
            blocks = projection.layout.split(matrix, "head")  # [P, h, d, D]
            heads[kind].update(zip(projection.layout.roles, blocks[:, 0], strict=True))
    if all(torch.equal(W, heads["W + C"][role]) for role, W in heads["W"].items()):
        del heads["W + C"]
    temperature = xca_temperature(model.get_submodule(settings.layer))
    return {kind: head_jacobian(matrices, settings, temperature) for kind, matrices in heads.items()}


def _by_layer(projections: Mapping[str, AttentionProjection]) -> dict[str, list[AttentionProjection]]:
    """Return the projections of the attention layers of which q, k and v are known, by the name of the layer."""
    layers: dict[str, list[AttentionProjection]] = {}
    for name, projection in projections.items():
        layers.setdefault(name.rpartition(".")[0], []).append(projection)
    return {
        layer: found
        for layer, found in layers.items()
        if {role for projection in found for role in projection.layout.roles} == {"q", "k", "v"}
    }


def _build(subject: Subject, seed: int) -> nn.Module:
    try:
        return build_model(subject.cfg, seed)
    except OSError as error:
        raise UsageError(
            f"The initial weights of {subject.name} cannot be read: {error}. "
            "Start from scratch with --cfg-options model.backbone.init_cfg=None."
        ) from error


def _choose_layer(
    projections: Mapping[str, AttentionProjection], settings: JacobianSettings
) -> JacobianSettings | None:
    """Fill in the first layer of which q, k and v are known; None if there is none."""
    layers = list(_by_layer(projections))
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


def _without_conditioning(settings):
    """Set every ``conditioning`` and ``*_conditioning`` in nested settings to None."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            named = key == "conditioning" or str(key).endswith("_conditioning")
            settings[key] = None if named else _without_conditioning(value)
    elif isinstance(settings, Sequence) and not isinstance(settings, str):
        return type(settings)(map(_without_conditioning, settings))
    return settings

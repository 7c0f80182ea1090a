"""What the attention of a model looks like in one state: at initialisation, or with the weights of a checkpoint."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from mmspectral import ops
from mmspectral.analysis.jacobian import HeadJacobian, JacobianSettings, head_jacobian, xca_temperature
from mmspectral.analysis.projections import AttentionProjection, attention_projections
from mmspectral.layers import Saturation, attention_layers, probe_tokens, saturation

CORRELATIONS = (0.0, 0.5, 0.9)
DEFAULT_PROBE_LENGTH = 196  # 224-pixel images in patches of 16


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
    """

    label: str
    spectra: list[ProjectionSpectrum]
    saturations: dict[tuple[str, float], Saturation]
    jacobians: dict[str, HeadJacobian]

    @property
    def conditioned(self) -> bool:
        """Whether any projection has a correction."""
        return any(row.with_ is not None for row in self.spectra)


def build_model(cfg: Config, seed: int) -> nn.Module:
    """Build and initialise the config's model, quietly, as a new draw from ``seed``."""
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


def scopes(model: nn.Module) -> dict[str, str]:
    """Return the scope of each attention projection of a model by name, as :func:`measure` takes it."""
    return {name: projection.scope for name, projection in attention_projections(model).items()}


def jacobian_layers(model: nn.Module) -> list[str]:
    """Return the attention layers of which q, k and v are known, in module order."""
    roles: dict[str, set[str]] = {}
    for name, projection in attention_projections(model).items():
        roles.setdefault(_parent(name), set()).update(projection.layout.roles)
    return [layer for layer, found in roles.items() if found == {"q", "k", "v"}]


@torch.no_grad()
def measure(
    model: nn.Module, label: str, scope_of: Mapping[str, str], jacobian: JacobianSettings | None = None
) -> ModelState:
    """Measure a model in the state that it is in.

    Args:
        model: The model that the report is about, or its stock twin.
        label: Name of the state.
        scope_of: Scope of each projection of the conditioned model by name, so
            that a twin is measured by the same matrices.
        jacobian: Which Jacobian to take, if any.

    Raises:
        ValueError: The model lacks one of the projections.
    """
    projections = attention_projections(model)
    missing = [name for name in scope_of if name not in projections]
    if missing:
        raise ValueError(
            f"{label}: the model has no attention projection {', '.join(missing[:4])}; the twin must be the same "
            "architecture without conditioning."
        )
    chosen = {name: projections[name] for name in scope_of}
    return ModelState(
        label,
        [row for name, projection in chosen.items() for row in _spectra(projection, scope_of[name])],
        _saturations(model),
        _jacobians(model, chosen, jacobian) if jacobian else {},
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
    """Keep mmengine from listing how each parameter was initialised."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

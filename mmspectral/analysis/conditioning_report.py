"""Measure a conditioned model and its stock twin, at initialisation and with trained weights, for one report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mmengine.config import Config
from torch import nn

from mmspectral.analysis.conditioning_history import kappa_history
from mmspectral.analysis.jacobian import JacobianSettings
from mmspectral.analysis.model_states import ModelState, build_model, jacobian_layers, measure, scopes, stock_twin
from mmspectral.analysis.report_html import ReportData
from mmspectral.checkpoints.load import load_backbone
from mmspectral.errors import UsageError
from mmspectral.version import __version__


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Args:
        name: Of its config, for the head of the page.
        cfg: Its config.
        checkpoints: Paths or URLs of trained weights.
        work_dir: Folder of its run, with the log; None takes that of the last checkpoint.
    """

    name: str
    cfg: Config
    checkpoints: Sequence[str] = ()
    work_dir: Path | None = None

    def run_folder(self) -> Path | None:
        """Return the folder of the run, if one is known."""
        local = [checkpoint for checkpoint in self.checkpoints if "://" not in checkpoint]
        return self.work_dir or (Path(local[-1]).expanduser().parent if local else None)


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
    scope_of = scopes(model)
    if not scope_of:
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
                states.append(measure(model, prefix + label, scope_of, jacobian))
            except ValueError as error:
                raise UsageError(str(error)) from error
    folders = {"conditioned model": subject.run_folder(), "stock twin": twin.run_folder()}
    return ReportData(
        title=f"Conditioning report: {Path(subject.name).stem}",
        facts=[
            ("config", subject.name),
            ("checkpoints", ", ".join(subject.checkpoints) or "none"),
            ("stock twin", ", ".join((twin.name, *twin.checkpoints))),
            ("initial weights", f"drawn anew from the configs with seed {seed}, not those that a run started from"),
            ("versions", f"mmspectral {__version__}, torch {torch.__version__}"),
        ],
        states=states,
        histories={f"{name} ({path})": kappa_history(path) for name, path in folders.items() if path},
        jacobian=jacobian,
    )


def _build(subject: Subject, seed: int) -> nn.Module:
    try:
        return build_model(subject.cfg, seed)
    except OSError as error:
        raise UsageError(
            f"The initial weights of {subject.name} cannot be read: {error}. "
            "Start from scratch with --cfg-options model.backbone.init_cfg=None."
        ) from error


def _choose_layer(model: nn.Module, settings: JacobianSettings) -> JacobianSettings | None:
    """Fill in the first layer that the Jacobian can be taken of; None if there is none."""
    layers = jacobian_layers(model)
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

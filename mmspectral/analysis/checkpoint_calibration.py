"""Calibrate the attention over random features of a checkpoint, and write it as one."""

from collections.abc import Mapping
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from torch import nn

from mmspectral.analysis.model_calibration import (
    AttentionInputs,
    LayerCalibration,
    calibratable_kernels,
    calibrate_model,
    calibration_batches,
    gather_inputs,
    see,
)
from mmspectral.checkpoints import Weights, fit_to_model, read_checkpoint, write_checkpoint
from mmspectral.errors import UsageError


def calibrate_checkpoint(
    cfg: Config,
    source: str,
    target: Path,
    *,
    num_batches: int = 8,
    batch_size: int = 4,
    num_features: int | None = None,
    part: str = "train",
    seed: int = 0,
    force: bool = False,
    **options,
) -> list[LayerCalibration]:
    """Write what a checkpoint has of the config's model, and calibrated kernels, for models with the same ``kernel``.

    Args:
        cfg: Config of a detector or classifier whose backbone has a ``kernel``.
        source: Path or URL, of softmax attention or with kernels, under any names that ``init_cfg`` loads.
        target: File to write, ``.pth`` or ``.safetensors``.
        num_batches: Batches of the config's data to run the model on.
        batch_size: Images in each.
        num_features: m, if not that of the config's ``kernel``.
        part: Whose data: ``"train"``, ``"val"`` or ``"test"``.
        seed: Of images, tokens and draws.
        force: Whether ``target`` is replaced.
        **options: Other arguments of :func:`mmspectral.analysis.model_calibration.calibrate_model`.

    Raises:
        UsageError: The model has no kernel to calibrate, the config no such data
            or an empty data set, the checkpoint is not of the model, or ``target`` is there.
    """
    if target.exists() and not force:
        raise UsageError(f"{target} is there already; choose another name or pass --force.")
    try:
        model, weights, loaded = _load(cfg, source, num_features)
        batches = _batches(cfg, part, num_batches, batch_size, seed)
        rows = calibrate_model(model, batches, lambda batch: see(model, batch), seed=seed, **options)
        state = model.cpu().state_dict()
        # What neither the file nor calibration gave, such as another head, is random and no part of the result.
        kernels = tuple(f"{name}." for name in calibratable_kernels(model))
        tensors = {name: t for name, t in state.items() if name in weights.tensors or name.startswith(kernels)}
        meta = {"meta": loaded["meta"]} if isinstance(loaded, Mapping) and "meta" in loaded else {}
        write_checkpoint(dict(state_dict=Weights(tensors, state._metadata).state_dict(), **meta), target, force)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return rows


def checkpoint_inputs(
    cfg: Config,
    source: str,
    *,
    num_batches: int = 8,
    batch_size: int = 4,
    num_tokens: int = 256,
    part: str = "train",
    seed: int = 0,
) -> dict[str, AttentionInputs]:
    """Return the queries, keys and values of a checkpoint's softmax attention on the config's data, by kernel.

    Arguments and errors are those of :func:`calibrate_checkpoint`; at most ``num_tokens`` of each image are kept.
    """
    try:
        model, _, _ = _load(cfg, source)
        batches = _batches(cfg, part, num_batches, batch_size, seed)
        if not calibratable_kernels(model):
            raise UsageError("the config's model has no attention over random features to read inputs of.")
        with torch.no_grad():
            return gather_inputs(model, batches, lambda batch: see(model, batch), num_tokens, seed)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _load(cfg: Config, source: str, num_features: int | None = None) -> tuple[nn.Module, Weights, object]:
    settings = dict(cfg.model)
    if "data_preprocessor" in cfg:
        settings.setdefault("data_preprocessor", cfg.data_preprocessor)  # as the Runner does
    if num_features is not None:
        if not settings.get("backbone", {}).get("kernel"):
            raise UsageError("the config's model.backbone has no kernel to give this number of features.")
        settings["backbone"] = dict(
            settings["backbone"], kernel=dict(settings["backbone"]["kernel"], num_features=num_features)
        )
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        model = MODELS.build(settings)
    loaded = read_checkpoint(source)
    weights, _ = fit_to_model(model, loaded, source)
    model.load_state_dict(weights.state_dict(), strict=False)
    return model.to(get_device()), weights, loaded


def _batches(cfg: Config, part: str, num_batches: int, batch_size: int, seed: int) -> list:
    if cfg.get(f"{part}_dataloader") is None:
        raise UsageError(f"the config has no {part}_dataloader to take images from.")
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        try:
            loader = Runner.build_dataloader(cfg[f"{part}_dataloader"], seed=seed)
        except ValueError as error:  # such as numpy's, of mmengine's datasets without images
            raise UsageError(f"{part}_dataloader cannot be built; has its data set any image? {error}") from error
        return calibration_batches(loader, num_batches, batch_size, seed)

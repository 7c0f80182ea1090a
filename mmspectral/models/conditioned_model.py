"""Condition any model of OpenMMLab by one line of its config."""

import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from mmspectral.layers import METADATA_KEY, build_conditioning, condition, corrected_parameters
from mmspectral.ops.precision import at_least_float32
from mmspectral.registry import MODELS


@MODELS.register_module("ConditionedModel")
def conditioned_model(
    model_type: str,
    conditioning: dict | None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    layout: Mapping | None = None,
    **kwargs,
) -> nn.Module:
    """Build a model of another library with conditioned q, k and v projections.

    A config that inherits ``model=dict(type='Mask2Former', backbone=..., ...)``
    becomes conditioned by::

        model = dict(type='mmspectral.ConditionedModel', model_type='Mask2Former',
                     conditioning=dict(type='IdentityCorrection', scale=1.0),
                     include=['panoptic_head.transformer_decoder'])

    What is built is the stock class, so names in checkpoints, ``cfg.model.backbone``,
    ``init_detector`` and the inferencers, test-time augmentation and distributed
    wrappers see nothing unusual. The model is conditioned before its weights are
    drawn or loaded, which a hook of the runner would be too late for, and which
    tools without a runner would never call.

    A file whose metadata says that it was trained with this correction is loaded
    as it is. Weights trained without one change their function; with
    ``preserve_function=True`` in ``conditioning`` C is taken off them, otherwise
    there is a warning. So beware of ``preserve_function`` with files that lost
    their metadata (safetensors, state dicts rebuilt by hand).

    Args:
        model_type: ``type`` of the model, with or without a scope.
        conditioning: What is done; None builds the stock model.
        include: See :func:`mmspectral.layers.condition`.
        exclude: See :func:`mmspectral.layers.condition`.
        layout: See :func:`mmspectral.layers.condition`.
        **kwargs: Arguments of ``model_type``.

    Returns:
        An instance of ``model_type``.

    Raises:
        ValueError: Nothing to condition, or not so.
    """
    model = MODELS.build(dict(type=model_type, **kwargs))
    correction = build_conditioning(conditioning)
    preserve_function = getattr(correction, "preserve_function", False)
    if preserve_function:  # of what is loaded; what was just drawn at random has no function to keep
        correction = build_conditioning(dict(conditioning, preserve_function=False))
    condition(model, correction, include, exclude, layout)
    for module in model.modules():
        if corrected_parameters(module):
            module._register_load_state_dict_pre_hook(
                _keep_function if preserve_function else _warn_of_change, with_module=True
            )
    return model


def _keep_function(module: nn.Module, state_dict: dict, prefix: str, local_metadata: Mapping, *_: object) -> None:
    """Take C off weights that were trained without a correction, as they are loaded."""
    if METADATA_KEY in local_metadata:
        _warn_of_change(module, state_dict, prefix, local_metadata)
        return
    for name, layout in corrected_parameters(module).items():
        if f"{prefix}{name}" in state_dict:
            weight = state_dict[f"{prefix}{name}"]
            state_dict[f"{prefix}{name}"] = module.conditioning.uncorrected(at_least_float32(weight), layout)


def _warn_of_change(module: nn.Module, state_dict: dict, prefix: str, local_metadata: Mapping, *_: object) -> None:
    if not any(f"{prefix}{name}" in state_dict for name in corrected_parameters(module)):
        return
    trained = dict(local_metadata.get(METADATA_KEY, {}))
    trained.pop("layout", None)
    if trained == module.conditioning.settings():
        return
    under = f"with {trained}" if trained else "without a correction (or lost their metadata)"
    warnings.warn(
        f"weights that were trained {under} are loaded into a model with {module.conditioning}, which changes what it "
        "computes. Set preserve_function=True in `conditioning` to take C off weights trained without one.",
        stacklevel=2,
    )

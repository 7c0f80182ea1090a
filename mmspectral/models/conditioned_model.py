"""Condition any model of OpenMMLab by one line of its config."""

import copy
from collections.abc import Mapping, Sequence

from torch import nn

from mmspectral.arguments import TEXT, checked
from mmspectral.checkpoints import reconcile_while_loading
from mmspectral.layers import build_conditioning, condition, corrected_parameters
from mmspectral.registry import MODELS


@MODELS.register_module("ConditionedModel")
@checked(model_type=TEXT)
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
    initialised or loaded, which a hook of the runner would be too late for, and which
    tools without a runner would never call.

    A file whose metadata says that it was trained with this correction is loaded
    as it is, one that was trained with another is refused. Weights trained
    without one change their function; with ``preserve_function=True`` in
    ``conditioning`` C is subtracted from them, otherwise there is a warning. So
    beware of ``preserve_function`` with files that lost their metadata
    (safetensors, state dicts rebuilt by hand).

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
    correction = copy.copy(build_conditioning(conditioning))
    preserve_function = getattr(correction, "preserve_function", False)
    if preserve_function:  # of what is loaded; random weights have no function to keep
        correction.preserve_function = False
    condition(model, correction, include, exclude, layout)
    if preserve_function:
        correction.preserve_function = True
    for module in model.modules():
        if corrected_parameters(module):
            module._register_load_state_dict_pre_hook(reconcile_while_loading, with_module=True)
    return model

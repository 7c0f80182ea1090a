"""Registries of scope ``mmspectral``: one child of every mmengine root registry.

mmengine imports ``mmspectral.registry`` when it meets the prefix
``mmspectral.`` in a ``type``, and the ``locations`` below on the first look-up.
So ``type='mmspectral.SpectralXCiT'`` builds under the default scope of mmdet,
of mmpretrain or of nobody, without ``custom_imports``. Keep the host's default
scope: ours is only the prefix.
"""

import mmengine.registry as _root
from mmengine.registry import Registry


def _child(root: Registry, location: str) -> Registry:
    return Registry(root.name, parent=root, scope="mmspectral", locations=[f"mmspectral.{location}"])


RUNNERS = _child(_root.RUNNERS, "engine")
RUNNER_CONSTRUCTORS = _child(_root.RUNNER_CONSTRUCTORS, "engine")
LOOPS = _child(_root.LOOPS, "engine")
HOOKS = _child(_root.HOOKS, "engine.hooks")
STRATEGIES = _child(_root.STRATEGIES, "engine")
LOG_PROCESSORS = _child(_root.LOG_PROCESSORS, "engine")
OPTIMIZERS = _child(_root.OPTIMIZERS, "engine")
OPTIM_WRAPPERS = _child(_root.OPTIM_WRAPPERS, "engine")
OPTIM_WRAPPER_CONSTRUCTORS = _child(_root.OPTIM_WRAPPER_CONSTRUCTORS, "engine.optimizers")
PARAM_SCHEDULERS = _child(_root.PARAM_SCHEDULERS, "engine")
DATASETS = _child(_root.DATASETS, "datasets.shapes")
DATA_SAMPLERS = _child(_root.DATA_SAMPLERS, "datasets")
TRANSFORMS = _child(_root.TRANSFORMS, "datasets.image_loading")
MODELS = _child(_root.MODELS, "models")
MODEL_WRAPPERS = _child(_root.MODEL_WRAPPERS, "models")
WEIGHT_INITIALIZERS = _child(_root.WEIGHT_INITIALIZERS, "models")
TASK_UTILS = _child(_root.TASK_UTILS, "models")
METRICS = _child(_root.METRICS, "evaluation")
EVALUATOR = _child(_root.EVALUATOR, "evaluation")
VISUALIZERS = _child(_root.VISUALIZERS, "engine")
VISBACKENDS = _child(_root.VISBACKENDS, "engine")
INFERENCERS = _child(_root.INFERENCERS, "engine")
FUNCTIONS = _child(_root.FUNCTIONS, "engine")

"""Refuse to continue the training of another model."""

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from mmspectral.errors import UsageError
from mmspectral.registry import HOOKS


@HOOKS.register_module()
class ResumeCheckHook(Hook):
    """Compare the weights of a checkpoint with those of the model before a run is resumed.

    mmengine logs a difference and trains what did not fit from its random start.
    """

    priority = "VERY_HIGH"  # before the EMA hook, which takes part of the weights

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare names and shapes.

        Raises:
            UsageError: They differ, and the run is to be resumed.
        """
        if not runner._resume:
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        saved = {name.removeprefix("module."): tuple(v.shape) for name, v in checkpoint["state_dict"].items()}
        different = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        if different:
            examples = "; ".join(
                f"{name} is {_shape(saved.get(name))} there and {_shape(own.get(name))} in the model"
                for name in different[:3]
            )
            raise UsageError(
                f"{runner._load_from or 'The checkpoint'} is that of another model: {len(different)} of its weights "
                f"differ ({examples}). Resume with the config that wrote it, or start a new run from its weights, with "
                "load_from and another --work-dir."
            )


def _shape(shape: tuple | None) -> str:
    return "absent" if shape is None else str(list(shape))

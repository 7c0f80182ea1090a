"""Load the weights of ``load_from`` and of a test by the loader that ``init_cfg`` uses."""

from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import BaseLoop, Runner

from mmspectral.arguments import checked, real
from mmspectral.checkpoints import fit_to_model, fit_whole
from mmspectral.errors import UsageError
from mmspectral.registry import HOOKS


@HOOKS.register_module()
class CheckpointFittingHook(Hook):
    """Bring a file that mmengine's Runner read under the names of its model, or stop.

    See :func:`mmspectral.checkpoints.load.fit_to_model`. A run that is resumed takes its own file as it is.

    Args:
        min_matched: Share of the backbone's parameters that must be matched.
    """

    priority = "VERY_HIGH"  # the EMA hook, which comes later, copies the weights from the checkpoint

    @checked(min_matched=real(0, 1))
    def __init__(self, min_matched: float = 0.9) -> None:
        self.min_matched = min_matched

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replace the file's ``state_dict`` by one that fits the model, in place.

        Raises:
            UsageError: It fits the model too little, or was trained under another correction.
        """
        if runner._resume:
            return
        model = runner.model
        while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
            model = model.module
        trains = isinstance(runner._train_loop, BaseLoop)
        fit = fit_to_model if trains else fit_whole  # in a test, random heads would be scored
        try:
            weights, _ = fit(model, checkpoint, str(runner._load_from), self.min_matched)
        except ValueError as error:
            raise UsageError(str(error)) from error
        checkpoint["state_dict"] = weights.state_dict()

"""Choose M, proposal and shift of attention over random features before training."""

import mmengine.dist
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.model.weight_init import PretrainedInit
from mmengine.runner import Runner
from torch import nn

from mmspectral.analysis import (
    Fit,
    calibratable_kernels,
    calibrate_model,
    calibration_batches,
    calibration_table,
    see,
)
from mmspectral.arguments import checked, whole
from mmspectral.engine.hooks.feature_redraw_hook import averaged_models
from mmspectral.registry import HOOKS


@HOOKS.register_module()
class DarkCalibrationHook(Hook):
    """Calibrate every :class:`mmspectral.layers.RandomFeatureKernel` once weights are loaded, unless a run is resumed.

    See :func:`mmspectral.analysis.model_calibration.calibrate_model`: inputs are those of the
    model with exact softmax, the one that the weights come from. Logs a
    table: anisotropy of each layer and the estimated error before and after.

    Images are drawn from the training data; which depends on ``seed`` alone, and training sees and draws what it would
    without the hook. All ranks take the result of rank 0, and so do averaged copies of EMA hooks.

    Args:
        num_batches: Batches to run the model on.
        batch_size: Images in each; all are kept.
        num_tokens: Tokens kept of each image, see ``calibrate_model``.
        fit_steps: Steps with which M is fitted; 0 leaves fitting out.
        seed: Of images, tokens and draws.

    Raises:
        ValueError: A number is out of range, the data set is empty, or a layer cannot be calibrated.
    """

    priority = "LOW"  # after EMAHook, usually NORMAL: mmpretrain's loads averaged weights into the model

    @checked(num_batches=whole(1), batch_size=whole(1), num_tokens=whole(2), fit_steps=whole(0), seed=whole(0))
    def __init__(
        self, num_batches: int = 8, batch_size: int = 4, num_tokens: int = 256, fit_steps: int = 300, seed: int = 0
    ) -> None:
        self.images = dict(num_batches=num_batches, batch_size=batch_size, seed=seed)
        self.options = dict(num_tokens=num_tokens, fit=Fit(fit_steps) if fit_steps else None, seed=seed)

    def before_train(self, runner: Runner) -> None:
        """Calibrate, and copy the result to other ranks and averaged models."""
        if runner.iter:  # resumed: M is in the checkpoint, and has been trained since
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        kernels = calibratable_kernels(model)
        if not kernels:
            runner.logger.warning("DarkCalibrationHook: no attention of the model has an M, a proposal or a shift.")
            return
        if not runner._load_from and not any(map(_loads_weights, model.modules())):
            runner.logger.warning(
                "DarkCalibrationHook: the weights are random: there is no load_from and no init_cfg of type "
                "'Pretrained'. What is calibrated on them does not fit those that training will find."
            )
        batches = calibration_batches(runner.train_dataloader, **self.images)
        rows = calibrate_model(model, batches, lambda batch: see(model, batch), **self.options)
        for kernel in kernels.values():
            for tensor in kernel.state_dict().values():
                mmengine.dist.broadcast(tensor)
        for average in averaged_models(runner):
            for own, averaged in zip(kernels.values(), calibratable_kernels(average).values(), strict=True):
                averaged.load_state_dict(own.state_dict())
        runner.logger.info(f"DarkCalibrationHook: medians over the heads of each layer.\n{calibration_table(rows)}")


def _loads_weights(module: nn.Module) -> bool:
    init_cfg = getattr(module, "init_cfg", None)
    return isinstance(init_cfg, dict) and init_cfg.get("type") in ("Pretrained", PretrainedInit)

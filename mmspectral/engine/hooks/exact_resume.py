"""Hooks under which a resumed run ends like an uninterrupted one."""

import functools
import random
from bisect import bisect
from collections.abc import Callable, Iterator

import mmengine.dataset
import mmengine.hooks
import numpy as np
import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from mmspectral.errors import UsageError
from mmspectral.registry import HOOKS

# mmengine prints what begins with "val" among the metrics of each validation.
_STARTED, _FORMERLY = "started_validation_at", "validation_started_at"


@HOOKS.register_module()
class ResumeCheckHook(Hook):
    """Refuse to continue the training of another model, by names and shapes of the weights.

    mmengine logs a difference and trains what did not fit from its random start.
    """

    priority = "VERY_HIGH"  # before the EMA hook, which takes part of the weights

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Raise ``UsageError`` if the weights differ and the run is to be resumed."""
        if not runner._resume:
            return
        own = {name: list(value.shape) for name, value in _unwrapped(runner).state_dict().items()}
        saved = {name.removeprefix("module."): list(v.shape) for name, v in checkpoint["state_dict"].items()}
        different = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        if different:
            examples = "; ".join(
                f"{name} is {saved.get(name, 'absent')} there and {own.get(name, 'absent')} in the model"
                for name in different[:3]
            )
            raise UsageError(
                f"{runner._load_from or 'The checkpoint'} is that of another model: {len(different)} of its weights "
                f"differ ({examples}). Resume with the config that wrote it, or start a new run from its weights, with "
                "load_from and another --work-dir."
            )


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed python, numpy and torch from (seed, rank, epoch, iteration) at the start of each epoch.

    A run that is resumed from the checkpoint of an epoch then draws what the uninterrupted run would have drawn:
    dropout, augmentation, the samples of a detector's heads. On a deterministic device the weights are the same, bit
    for bit. mmengine seeds once, at the start of each process, and gives the loader's workers the same numbers in
    every epoch; here each worker is seeded from torch's seed for it, which the main process draws when the epoch
    begins. Workers must not outlive the epoch: ``persistent_workers=False``.

    Iteration-based loops have one epoch: they are seeded when they start or are resumed, so a resumed run goes on
    with other numbers, and does not repeat the first ones.
    """

    priority = "VERY_HIGH"  # whatever another hook draws at the start of an epoch is drawn after seeding

    def before_train(self, runner: Runner) -> None:
        """Take over the seeding of workers; warn of what a resumed run cannot repeat."""
        loader = runner.train_dataloader
        if any(type(hook) is mmengine.hooks.EarlyStoppingHook for hook in runner.hooks):
            runner.logger.warning(
                "EpochSeedHook: mmengine's EarlyStoppingHook forgets its best score when a run is resumed. Use type="
                "'mmspectral.EarlyStoppingHook'."
            )
        if not isinstance(runner.train_loop, EpochBasedTrainLoop):
            return
        if runner.iter % len(loader):
            runner.logger.warning(
                f"EpochSeedHook: iteration {runner.iter}, from which training continues, is not the end of an epoch of "
                f"{len(loader)} iterations. The epoch begins again, and losses will differ from those of an "
                "uninterrupted run. The checkpoint was saved inside an epoch, or with another batch size, number of "
                "processes or data set."
            )
        if loader.num_workers and loader.persistent_workers:
            runner.logger.warning(
                "EpochSeedHook: the workers of train_dataloader live on from epoch to epoch, and so do their random "
                "numbers, which a resumed run cannot repeat. Set train_dataloader.persistent_workers=False."
            )
        first = loader.worker_init_fn
        if getattr(first, "func", None) is mmengine.dataset.worker_init_fn:  # the Runner's; a user's own one stays
            loader.worker_init_fn = functools.partial(seed_worker, first=first)

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed this process, and empty what transforms in it have kept; workers begin each epoch with copies of it."""
        for transform in _transforms(runner.train_dataloader.dataset):
            if hasattr(transform, "results_cache"):  # mmdet's CachedMosaic and CachedMixUp
                transform.results_cache.clear()
        entropy = np.random.SeedSequence((runner.seed, runner.rank, runner.epoch, runner.iter))
        for_python, for_numpy, for_torch = entropy.spawn(3)
        random.seed(int(for_python.generate_state(1, np.uint64)[0]))
        np.random.seed(for_numpy.generate_state(4))  # noqa: NPY002 - the generator that transforms draw from
        torch.manual_seed(int(for_torch.generate_state(1, np.uint64)[0]))


def _transforms(part: object) -> Iterator[object]:
    """Yield the transforms in a data set, and below wrappers of data sets and of transforms."""
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from _transforms(each)
        return
    yield part
    for name in ("dataset", "datasets", "pipeline", "transforms"):
        yield from _transforms(vars(part).get(name, ()) if hasattr(part, "__dict__") else ())


def seed_worker(worker_id: int, first: Callable[[int], None]) -> None:
    """Seed a worker of a data loader by the number that the main process drew for it, after calling ``first``."""
    first(worker_id)
    seed = get_worker_info().seed
    random.seed(seed)
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))  # noqa: NPY002 - as above
    torch.manual_seed(seed)


@HOOKS.register_module()
class PendingGradientsHook(Hook):
    """Save gradients that are accumulated but not yet used, and give them back to a resumed run.

    With ``accumulative_counts=n`` an epoch need not end with an update; mmengine loses what was accumulated by then.
    Ranks have gradients of their own until the update averages them; here the end of an epoch does.
    """

    priority = "VERY_HIGH"  # before the checkpoint hook
    _restored: dict[str, Tensor] = {}

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Take them from the checkpoint of a run that is resumed."""
        self._restored = checkpoint.get("pending_gradients", {}) if runner._resume else {}

    def before_train(self, runner: Runner) -> None:
        """Give them to the parameters."""
        if self._restored and _accumulates(runner):
            runner.logger.info(f"Accumulated gradients of {len(self._restored)} parameters are resumed.")
            for name, gradient in self._restored.items():
                parameter = _unwrapped(runner).get_parameter(name)
                parameter.grad = gradient.to(parameter)
        self._restored = {}

    def after_train_epoch(self, runner: Runner) -> None:
        """Average over the ranks."""
        for gradient in _pending(runner).values():
            all_reduce(gradient, "mean")

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Put them into the checkpoint."""
        if pending := _pending(runner):
            checkpoint["pending_gradients"] = pending


def _accumulates(runner: Runner) -> bool:
    wrapper = runner.optim_wrapper
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return any(getattr(each, "_accumulative_counts", 1) > 1 for each in wrappers)


def _pending(runner: Runner) -> dict[str, Tensor]:
    """Return the gradients by name; after an update there are none, but for parameters that no optimizer has."""
    if not _accumulates(runner):
        return {}
    named = _unwrapped(runner).named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _unwrapped(runner: Runner) -> nn.Module:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


@HOOKS.register_module()
class DueValidationHook(Hook):
    """Validate a resumed model before training goes on, if that was the next thing to do.

    A checkpoint is written before the validation of its epoch. mmengine resumes with the next epoch: the metrics of
    the one before are lost, and so is what depends on them, such as the best checkpoint or a schedule that waits for a
    plateau. A checkpoint that was written again by its validation, because it was the best one, says so, and is not
    validated twice.
    """

    priority = "LOWEST"  # other hooks prepare themselves in before_train

    def before_train(self, runner: Runner) -> None:
        """Validate if the run was resumed where a validation is due."""
        former = runner.message_hub.runtime_info.pop(_FORMERLY, None)  # in checkpoints of earlier versions
        if runner.iter and _is_due(runner) and runner.message_hub.get_info(_STARTED, former) != runner.iter:
            runner.logger.info(f"Validating the checkpoint: this was due at iteration {runner.iter}.")
            runner.val_loop.run()

    def before_val(self, runner: Runner) -> None:
        """Note the validation for a checkpoint that is written at its end."""
        runner.message_hub.update_info(_STARTED, runner.iter)


def _is_due(runner: Runner) -> bool:
    """Whether the training loop, had it come here by itself, would validate now."""
    loop = runner.train_loop
    if runner.val_loop is None:
        return False
    by_epoch = isinstance(loop, EpochBasedTrainLoop)
    step, last = (loop.epoch, loop.max_epochs) if by_epoch else (loop.iter, loop.max_iters)
    interval = loop.dynamic_intervals[bisect(loop.dynamic_milestones, step + 1) - 1]
    return step >= loop.val_begin and (step % interval == 0 or step == last)


@HOOKS.register_module()
class EarlyStoppingHook(mmengine.hooks.EarlyStoppingHook):
    """Stop where the uninterrupted run would have stopped.

    mmengine's hook, whose arguments it takes, keeps the best score and the count
    of validations without a better one in itself, and a resumed run starts with
    neither. This one keeps them in the message hub, and so in each checkpoint.
    """

    priority = "LOW"  # before the checkpoint hook, whose best checkpoint then knows the validation that it is of

    def before_train(self, runner: Runner) -> None:
        """Repeat the last decision of the run that is continued, by the settings of this one."""
        state = runner.message_hub.get_info(self._key, None)
        if state is not None:
            self.best_score, self.wait_count, score = state
            super().after_val_epoch(runner, {self.monitor: score})

    def after_val_epoch(self, runner: Runner, metrics: dict) -> None:
        """Note what the decision depends on, and decide."""
        if self.monitor in metrics:
            state = [float(self.best_score), self.wait_count, float(metrics[self.monitor])]
            runner.message_hub.update_info(self._key, state)
        super().after_val_epoch(runner, metrics)

    @property
    def _key(self) -> str:
        return f"early_stopping/{self.monitor}"

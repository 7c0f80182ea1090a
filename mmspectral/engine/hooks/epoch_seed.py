"""Make what an epoch draws at random depend on nothing before it."""

import functools
import random
from collections.abc import Callable

import mmengine.dataset
import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import get_worker_info

from mmspectral.registry import HOOKS


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed python, numpy and torch from (seed, rank, epoch, iteration) at the start of each epoch.

    A run that is resumed from the checkpoint of an epoch then draws what the
    uninterrupted run would have drawn: dropout, augmentation, the samples of a
    detector's heads. On a deterministic device the weights are the same, bit for
    bit. mmengine seeds once, at the start of each process.

    mmengine also gives the loader's workers the same numbers in every epoch; here
    they differ, since each worker is seeded from torch's seed for it, which the
    main process draws when the epoch begins. Workers must not outlive the epoch:
    ``persistent_workers=False``.

    Iteration-based loops have one epoch: they are seeded when they start or are
    resumed, so a resumed run goes on with other numbers, and does not repeat the
    first ones.
    """

    priority = "VERY_HIGH"  # whatever another hook draws at the start of an epoch is drawn after seeding

    def before_train(self, runner: Runner) -> None:
        """Take over the seeding of workers; warn of what a resumed run cannot repeat."""
        loader = runner.train_dataloader
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
        if _from_mmengine(loader.worker_init_fn):
            loader.worker_init_fn = functools.partial(seed_worker, first=loader.worker_init_fn)

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed this process."""
        entropy = np.random.SeedSequence((runner.seed, runner.rank, runner.epoch, runner.iter))
        for_python, for_numpy, for_torch = entropy.spawn(3)
        random.seed(int(for_python.generate_state(1, np.uint64)[0]))
        np.random.seed(for_numpy.generate_state(4))  # noqa: NPY002 - the generator that transforms draw from
        torch.manual_seed(int(for_torch.generate_state(1, np.uint64)[0]))


def seed_worker(worker_id: int, first: Callable[[int], None]) -> None:
    """Seed a worker of a data loader by the number that the main process drew for it.

    Args:
        worker_id: Number of the worker.
        first: The function that the loader had; what else it sets stays.
    """
    first(worker_id)
    seed = get_worker_info().seed
    random.seed(seed)
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))  # noqa: NPY002 - as above
    torch.manual_seed(seed)


def _from_mmengine(worker_init_fn: Callable | None) -> bool:
    """Whether a loader has the function that the Runner gives it; a user's own one stays."""
    return getattr(worker_init_fn, "func", None) is mmengine.dataset.worker_init_fn

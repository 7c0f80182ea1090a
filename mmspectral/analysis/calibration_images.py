"""Images to calibrate on, out of the data that a config or a run has, and how a model of OpenMMLab sees them."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from mmengine.model import BaseModel
from torch.utils.data import DataLoader, RandomSampler


def calibration_batches(loader: DataLoader, num_batches: int, batch_size: int, seed: int = 0) -> list:
    """Return batches of the data set of ``loader``, collated as it does.

    Which images, and their random augmentation, depends on ``seed`` alone. What
    ``loader`` and this process draw afterwards stays as it is.

    Raises:
        ValueError: The data set is empty.
    """
    if not len(loader.dataset):
        raise ValueError("the data set to calibrate on is empty.")
    sampler = RandomSampler(loader.dataset, generator=torch.Generator().manual_seed(seed))
    batches = DataLoader(loader.dataset, batch_size, sampler=sampler, collate_fn=loader.collate_fn)
    with _random_numbers(seed):
        return list(itertools.islice(batches, num_batches))


def see(model: BaseModel, batch: dict | tuple | list) -> None:
    """Run the backbone of a detector or classifier on a batch of its data, without augmentation of batches."""
    data = model.data_preprocessor(batch, training=False)
    if hasattr(model, "extract_feat"):
        model.extract_feat(data["inputs"])  # without heads, which may need ops or boxes that are not there
    else:
        model._run_forward(data, mode="tensor")


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Seed python, numpy and torch on the CPU, and leave them as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the generator that transforms draw from
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - as above
        yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002 - as above

"""Calibrate every attention over random features of a model on images: M, proposal and shift.

Queries, keys and values are those of the model with exact softmax in all
layers, which is what pretrained weights have and what the features are to
approximate: errors of one layer are not fitted by the next.
"""

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.model import BaseModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from mmspectral.analysis.approximation import approximation_error
from mmspectral.analysis.dark_calibration import (
    DRAWS_OF_NO_LAYER,
    CalibratedGeometry,
    Fit,
    calibrate_geometry,
    query_key_moments,
)
from mmspectral.analysis.tables import markdown_table
from mmspectral.arguments import checked, whole
from mmspectral.layers import RandomFeatureKernel, feature_kernels
from mmspectral.ops.random_features import draw_projection, linear_attention, softmax_attention, theorem_3_2_proposal


@dataclass(frozen=True)
class LayerCalibration:
    """What calibration found for one kernel: medians over the heads of what a :class:`CalibratedGeometry` has.

    ``choice`` says which M were chosen, and for how many heads.
    """

    layer: str
    num_features: int
    effective_rank: float
    condition: float
    error_before: float
    error_after: float
    choice: str


class AttentionInputs(NamedTuple):
    """Queries, keys and values of one layer, each [B, h, N, d]."""

    q: Tensor
    k: Tensor
    v: Tensor


def calibratable_kernels(model: nn.Module) -> dict[str, RandomFeatureKernel]:
    """Return the kernels that have an M, a proposal or a shift, by name."""
    return {
        name: kernel
        for name, kernel in feature_kernels(model).items()
        if kernel.geometry or kernel.proposal or kernel.shift is not None
    }


@checked(num_tokens=whole(2), seed=whole())
def calibrate_model(
    model: nn.Module,
    batches: Iterable,
    forward: Callable[[Any], Any] | None = None,
    *,
    num_tokens: int = 256,
    fit: Fit | None = Fit(),  # noqa: B008
    seed: int = 0,
) -> list[LayerCalibration]:
    """Set M, proposal and shift of each kernel, in place, by :func:`calibrate_geometry` on real inputs.

    A kernel gets what it has: the M of a ``temperature`` is the best t I, and one
    without M only its proposal and shift. Under ``sharing="model"`` the common M is
    chosen on inputs of all layers.

    Args:
        model: In any mode; it is run in eval mode.
        batches: A few, of what ``forward`` takes.
        forward: Runs the model on one batch; default ``model``.
        num_tokens: Tokens of each image that are kept at most, at random: 12 * images * num_tokens *
            channels bytes per layer, on the CPU.
        fit: How M is fitted; None for the family alone.
        seed: Of the tokens, and of the draws that M is chosen with.

    Returns:
        One row per kernel.

    Raises:
        ValueError: No kernel can be calibrated, one was not reached or has a
            mask, or the inputs of a layer do not suffice.
    """
    kernels = calibratable_kernels(model)
    if not kernels:
        raise ValueError(
            "the model has no attention over random features that can be calibrated; its backbone needs "
            "kernel=dict(type='dark', ...), see mmspectral.models.DarkViT."
        )
    inputs = gather_inputs(model, batches, forward or model, num_tokens, seed)
    groups: dict[int, list[str]] = {}
    for name, kernel in kernels.items():
        common = kernel.sharing == "model" and kernel.geometry == "matrix"
        groups.setdefault(id(kernel.M) if common else id(kernel), []).append(name)
    found = {}
    for names in groups.values():
        kernel = kernels[names[0]]
        sample = _pool([inputs[name] for name in names]) if len(names) > 1 else inputs[names[0]]
        try:
            geometry = _calibrate(kernel, AttentionInputs(*(x.to(kernel.w.device) for x in sample)), fit, seed)
        except ValueError as error:
            raise ValueError(f"{names[0]}: {error}") from error
        for name in names:
            found[name] = _row(name, kernels[name].num_features, geometry)
            M = geometry.M if kernels[name].geometry else None
            if kernels[name].geometry == "temperature":
                M = M.diagonal(dim1=1, dim2=2).mean(-1)  # [h]
            kernels[name].set_geometry(M, geometry.proposal, None if kernels[name].shift is None else geometry.shift)
    return [found[name] for name in kernels]


@torch.no_grad()
def gather_inputs(
    model: nn.Module, batches: Iterable, forward: Callable[[Any], Any], num_tokens: int, seed: int = 0
) -> dict[str, AttentionInputs]:
    """Return what the kernels of ``model`` get when all of them are exact softmax, by name, on the CPU.

    Arguments as in :func:`calibrate_model`. Batches of differing sizes give as
    many tokens as the smallest.

    Raises:
        ValueError: A kernel was not reached, or is called with a mask or causally.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[AttentionInputs]] = {name: [] for name in calibratable_kernels(model)}

    def attend(name: str, kernel: RandomFeatureKernel, args: tuple, kwargs: dict, _: Tensor) -> Tensor:
        if name in parts:
            if any(option is not None and option is not False for option in (*args[3:], *kwargs.values())):
                raise ValueError(f"{name} is called with a mask or causally, on which nothing can be calibrated.")
            queries, keys = (torch.randperm(x.shape[2], generator=generator)[:num_tokens] for x in args[:2])
            chosen = zip(args[:3], (queries, keys, keys), strict=True)
            parts[name].append(AttentionInputs(*(x[:, :, tokens.to(x.device)].float().cpu() for x, tokens in chosen)))
        return softmax_attention(*args, **kwargs, scale=kernel.scale)

    training = model.training
    handles = [
        kernel.register_forward_hook(partial(attend, name), with_kwargs=True)
        for name, kernel in feature_kernels(model).items()
    ]
    try:
        model.eval()
        for batch in batches:
            forward(batch)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    missed = [name for name, found in parts.items() if not found]
    if missed:
        raise ValueError(f"{missed[0]} was not reached: there was no batch, or the forward pass left it out.")
    return {name: AttentionInputs(*map(_join, zip(*found, strict=True))) for name, found in parts.items()}


def calibration_table(rows: Sequence[LayerCalibration]) -> str:
    """Return one line per layer, and the medians over layers of both errors."""
    header = ("layer", "m", "effective rank", "condition", "error, M = I", "error, calibrated", "M (heads)")
    lines = [
        [row.layer, row.num_features, f"{row.effective_rank:.1f}", f"{row.condition:.3g}"]
        + [f"{row.error_before:.3f}", f"{row.error_after:.3f}", row.choice]
        for row in rows
    ]
    before, after = (statistics.median(getattr(row, name) for row in rows) for name in ("error_before", "error_after"))
    return markdown_table(header, [*lines, ["median", "", "", "", f"{before:.3f}", f"{after:.3f}", ""]])


def _calibrate(kernel: RandomFeatureKernel, sample: AttentionInputs, fit: Fit | None, seed: int) -> CalibratedGeometry:
    shared = kernel.sharing != "head"
    options = dict(shared=shared, rank=kernel.rank, scale=kernel.scale, fit=fit, seed=seed)
    if kernel.geometry != "matrix":
        options |= dict(strengths=(0.0,), fit=None)  # M = s I
    if kernel.geometry is None:
        options["scales"] = (1.0,)
    geometry = calibrate_geometry(
        *sample, kernel.num_features, sharp=kernel.proposal == "sharp", shift=kernel.shift is not None, **options
    )
    return _with_theorem_3_2(kernel, geometry, sample, seed) if kernel.proposal == "theorem_3_2" else geometry


def _with_theorem_3_2(
    kernel: RandomFeatureKernel, geometry: CalibratedGeometry, sample: AttentionInputs, seed: int
) -> CalibratedGeometry:
    """Draw from the proposal of the theorem, which exists for few layers, under an M that was chosen without."""
    q, k, v = sample
    scale = q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale
    M, Lambda = geometry.M.double(), query_key_moments(q, k, kernel.sharing != "head").covariance
    geometry = replace(geometry, proposal=theorem_3_2_proposal(scale * M @ Lambda @ M.mT))

    def attention(draw: int) -> Tensor:
        w = draw_projection(kernel.num_features, kernel.rank, seed, DRAWS_OF_NO_LAYER, draw).to(q.device)
        return linear_attention(q, k, v, geometry.features(w, scale))

    error = approximation_error(attention, softmax_attention(q, k, v, scale=scale), range(2)).softmax
    return replace(geometry, error_after=error)


def _row(name: str, num_features: int, geometry: CalibratedGeometry) -> LayerCalibration:
    numbers = (
        getattr(geometry, field).double().median().item()
        for field in ("effective_rank", "condition", "error_before", "error_after")
    )
    chosen = Counter(geometry.choice).most_common()
    return LayerCalibration(name, num_features, *numbers, "; ".join(f"{choice} ({n})" for choice, n in chosen))


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Stack sequences [B, h, N, d], taking as many tokens of each as the shortest has; their order is random."""
    length = min(part.shape[2] for part in parts)
    return torch.cat([part[:, :, :length] for part in parts])


def _pool(samples: Sequence[AttentionInputs]) -> AttentionInputs:
    """Take every n-th sequence of n layers, and heads as sequences of one head: layers may differ in their number."""
    return AttentionInputs(
        *(_join([x[:: len(samples)].flatten(0, 1)[:, None] for x in parts]) for parts in zip(*samples, strict=True))
    )


@checked(num_batches=whole(1), batch_size=whole(1), seed=whole(0))
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
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the generator that transforms draw from
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - as above
        try:
            return list(itertools.islice(batches, num_batches))
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - as above


def see(model: BaseModel, batch: dict | tuple | list) -> None:
    """Run the backbone of a detector or classifier on a batch of its data, without augmentation of batches."""
    data = model.data_preprocessor(batch, training=False)
    if hasattr(model, "extract_feat"):
        model.extract_feat(data["inputs"])  # without heads, which may need ops or boxes that are not there
    else:
        model._run_forward(data, mode="tensor")

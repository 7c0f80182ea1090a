"""Where a non-finite number came from: repeat a failed batch and look at every layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from mmspectral.analysis.projections import attention_projections
from mmspectral.layers import attention_layers, probe_tokens


def diagnose(model: nn.Module, batch: dict | tuple | list | None, wrapper: OptimWrapper) -> list[str]:
    """Return sentences about the first layer that fails on ``batch``.

    Runs the forward and backward pass once more, in training mode; gradients and
    buffers are left as they were. The gradients are looked at before clipping,
    which spreads one non-finite number over all of them. Dropout and random
    augmentation draw anew, so a failure that hangs on them may not come back.
    The largest logit is that of finite logits of the first sample (window) of each
    attention layer, or of probe tokens where what the layer gets is not finite.

    Args:
        model: An mmengine ``BaseModel``, without wrapper.
        batch: What the dataloader gave; None if unknown.
        wrapper: Its ``optim_context`` gives the precision.
    """
    sentences = _bad_weights(model)
    if batch is not None:
        try:
            sentences += _repeat(model, batch, wrapper)
        except Exception as error:  # it must not hide the stop that it explains
            sentences.append(f"Repeating the batch raised {type(error).__name__}: {error}.")
    return sentences + _worst_kappa(model)


def _repeat(model: nn.Module, batch: dict | tuple | list, wrapper: OptimWrapper) -> list[str]:
    failed: list[str] = []
    logits: dict[str, float] = {}
    handles = [
        module.register_forward_hook(_output_hook(name, failed))
        for name, module in model.named_modules()
        if name and module is not model.data_preprocessor
    ]
    handles += [
        layer.register_forward_pre_hook(_logit_hook(name, logits)) for name, layer in attention_layers(model).items()
    ]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        with _buffers_kept(model), torch.enable_grad():
            with wrapper.optim_context(model):
                data = model.data_preprocessor(batch, True)
                losses = model(**data, mode="loss") if isinstance(data, dict) else model(*data, mode="loss")
            loss, _ = model.parse_losses(losses)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    sentences = []
    if not all(tensor.isfinite().all() for tensor in _tensors(data)):
        sentences.append("The batch itself holds values that are not finite.")
    bad = [name for (name, _), grad in zip(parameters.items(), gradients, strict=True) if not _is_finite(grad)]
    if failed:
        sentences.append(f"First layer with such an output: {failed[0]}.")
    elif bad:
        # The backward pass goes from the last layer to the first.
        sentences.append(
            f"The forward pass is finite; first parameter, from the loss back, with a gradient that is not: {bad[-1]}."
        )
    else:
        sentences.append("Repeated, the last batch of this rank gives finite outputs and gradients.")
    if logits:
        name = max(logits, key=logits.get)
        sentences.append(f"Largest attention logit: {logits[name]:.3g} in {name}.")
    return sentences


def _bad_weights(model: nn.Module) -> list[str]:
    bad = [name for name, parameter in model.named_parameters() if not _is_finite(parameter)]
    return [f"Parameters that are not finite: {', '.join(bad[:5])} ({len(bad)} in all)."] if bad else []


def _worst_kappa(model: nn.Module) -> list[str]:
    found = [
        (after.kappa, f"{projection.name} ({role})")
        for projection in attention_projections(model).values()
        for role, (_, after) in projection.spectra().items()
        if after.kappa == after.kappa
    ]
    if not found:
        return []
    kappa, name = max(found)
    shown = "infinite (rank-deficient)" if kappa == float("inf") else f"{kappa:.3g}"
    return [f"Largest condition number of a projection in use: {shown} in {name}."]


def _output_hook(name: str, failed: list[str]):
    def look(module: nn.Module, args: tuple, output: object) -> None:
        if not failed and not all(map(_is_finite, _tensors(output))):
            failed.append(name)

    return look


def _logit_hook(name: str, logits: dict[str, float]):
    def measure(layer: nn.Module, args: tuple) -> None:
        tokens = args[0][:1]
        if not _is_finite(tokens):
            tokens = probe_tokens(*tokens.shape[1:], correlation=0.5).to(tokens)
        with torch.no_grad():
            found = layer.attention_logits(tokens)
        finite = found[found.isfinite()]
        if finite.numel():
            logits[name] = finite.abs().max().item()

    return measure


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(saved[name])


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(tensor.isfinite().all())


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)

"""Stop training before the first non-finite loss or gradient reaches the weights, and name the layer it came from."""

from collections.abc import Iterator
from functools import partial
from typing import NoReturn

import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner, find_latest_checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmspectral.analysis.projections import attention_projections
from mmspectral.arguments import checked, whole
from mmspectral.layers import attention_layers, probe_tokens
from mmspectral.registry import HOOKS


@HOOKS.register_module()
class NonFiniteGuardHook(Hook):
    """Raise ``FloatingPointError`` at the first non-finite loss or gradient.

    mmengine's hooks see a loss only after the update, so this one checks losses and gradients in a step-pre-hook of
    each optimizer: the parameters and the optimizer's state stay what they were. (What the forward pass changed, such
    as batch-norm statistics, has changed.) The message names the last checkpoint, which is from before, and, after
    repeating the failed batch, the layer, the largest attention logit and the largest kappa (:func:`diagnose`).

    Under a ``GradScaler`` (``AmpOptimWrapper``) overflowing gradients are part of the search for a scale, and the
    scaler skips the update by itself. There the hook stops after ``max_skipped`` skipped updates in a row, at a scale
    below 1, and at once for a non-finite loss, which no scale can cure.

    Under gradient accumulation every iteration is checked, so that the failed batch is the last one. A process that
    fails alone (its loss, or a gradient that is not yet shared) leaves it to the launcher to end the others.

    Cost per update: one fused norm of all gradients, one check per loss tensor, and one wait for the device.

    Args:
        max_skipped: Updates in a row that a ``GradScaler`` may skip.

    Raises:
        ValueError: ``max_skipped`` is less than 1.
    """

    @checked(max_skipped=whole(1))
    def __init__(self, max_skipped: int = 10) -> None:
        self.max_skipped = max_skipped
        self._handles = []
        self._losses: dict[str, Tensor] = {}
        self._stepped: set[torch.optim.Optimizer] = set()
        self._skipped: dict[OptimWrapper, int] = {}
        self._counts: dict[OptimWrapper, int] = {}
        self._batch = None

    def before_train(self, runner: Runner) -> None:
        self._model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._runner = runner
        wrapper = runner.optim_wrapper
        self._wrappers = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        self._skipped = dict.fromkeys(self._wrappers, 0)
        self._handles = [self._model.register_forward_hook(self._keep_losses, with_kwargs=True)]
        self._handles += [each.optimizer.register_step_pre_hook(self._before_step) for each in self._wrappers]

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Remember the batch, to find the layer with if it fails."""
        self._batch = data_batch
        self._losses.clear()
        self._stepped.clear()
        self._counts = {wrapper: wrapper.inner_count for wrapper in self._wrappers}

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        """Check what no optimizer step has checked: skipped updates, and iterations that only accumulate."""
        for wrapper in self._wrappers:
            if wrapper.optimizer in self._stepped:
                self._skipped[wrapper] = 0
            elif _scaler(wrapper) is None:
                self._check(_gradients(wrapper.optimizer), synchronized=False)
            else:
                self._check([], synchronized=False)
                if wrapper.inner_count != self._counts[wrapper] and wrapper.should_update():
                    self._count_skipped(wrapper)
        self._batch = None

    def after_train(self, runner: Runner) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _keep_losses(self, model: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if kwargs.get("mode") != "loss" or not isinstance(output, dict):
            return
        for name, value in output.items():
            if "loss" not in name:  # mmengine's rule: the others are only logged
                continue
            for index, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                self._losses[f"{name}[{index}]" if isinstance(value, (list, tuple)) else name] = tensor.detach()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            # A fused optimizer under a GradScaler gets scaled gradients and skips the update itself.
            self._check([], synchronized=False)
            if found_inf.item():
                return
        else:
            self._check(_gradients(optimizer), synchronized=True)
        self._stepped.add(optimizer)

    def _check(self, gradients: list[Tensor], synchronized: bool) -> None:
        """Stop if a loss or gradient is not finite; ``synchronized``: all ranks have these gradients and stop here."""
        losses = [loss.float().mean() for loss in self._losses.values()]
        norms = list(torch._foreach_norm(gradients)) if gradients else []
        if not losses and not norms:
            return
        device = (losses or norms)[0].device
        if torch.stack([value.float().to(device) for value in losses + norms]).isfinite().all():
            return
        bad_losses = {name: loss for name, loss in self._losses.items() if not loss.isfinite().all()}
        # The norm of finite numbers may overflow.
        bad_gradients = [gradient for gradient in gradients if not gradient.isfinite().all()]
        if bad_losses:
            values = ", ".join(f"{name} is {loss.float().mean().item()}" for name, loss in bad_losses.items())
            self._stop(values, repeat=synchronized and bool(bad_gradients))
        if bad_gradients:
            self._stop(
                f"the gradients of {len(bad_gradients)} of {len(gradients)} parameters are not finite",
                repeat=synchronized,
            )

    def _count_skipped(self, wrapper: OptimWrapper) -> None:
        self._skipped[wrapper] += 1
        scale = _scaler(wrapper).get_scale()
        if scale < 1:
            self._stop(f"the loss scale fell to {scale:g}: gradients overflow at any scale", repeat=True)
        if self._skipped[wrapper] >= self.max_skipped:
            self._stop(
                f"{self._skipped[wrapper]} updates in a row were skipped because gradients were not finite "
                f"(loss scale now {scale:g})",
                repeat=True,
            )

    def _stop(self, reason: str, repeat: bool) -> NoReturn:
        self.after_train(self._runner)
        message = [f"NonFiniteGuardHook: rank {get_rank()}, iteration {self._runner.iter + 1}: {reason}."]
        # Layers that exchange numbers between ranks would wait for ranks that have not failed.
        if repeat or get_world_size() == 1:
            message += diagnose(self._model, self._batch, self._wrappers[0])
        latest = find_latest_checkpoint(self._runner.work_dir)
        message.append("The parameters are those from before this update.")
        message.append(f"Last checkpoint: {latest}." if latest else "There is no checkpoint yet.")
        raise FloatingPointError(" ".join(message))


def _scaler(wrapper: OptimWrapper) -> torch.amp.GradScaler | None:
    scaler = getattr(wrapper, "loss_scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]


def diagnose(model: nn.Module, batch: dict | tuple | list | None, wrapper: OptimWrapper) -> list[str]:
    """Return sentences about the first layer of a ``BaseModel`` that fails on ``batch``.

    Repeats forward and backward pass in training mode and in the precision of
    ``wrapper``; gradients and buffers are left as they were. Gradients are looked at
    before clipping, which spreads one non-finite number over all of them. A failure
    that hangs on dropout or augmentation may not come back. The largest logit is that
    of finite logits of the first sample (window) of each attention layer, or of probe
    tokens where what the layer gets is not finite.
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

    def look(name: str, module: nn.Module, args: tuple, output: object) -> None:
        if not failed and not all(map(_is_finite, _tensors(output))):
            failed.append(name)

    @torch.no_grad()
    def measure(name: str, layer: nn.Module, args: tuple) -> None:
        tokens = args[0][:1]
        if not _is_finite(tokens):
            tokens = probe_tokens(*tokens.shape[1:], correlation=0.5).to(tokens)
        found = layer.attention_logits(tokens)
        finite = found[found.isfinite()]
        if finite.numel():
            logits[name] = finite.abs().max().item()

    handles = [
        module.register_forward_hook(partial(look, name))
        for name, module in model.named_modules()
        if name and module is not model.data_preprocessor
    ]
    handles += [
        layer.register_forward_pre_hook(partial(measure, name)) for name, layer in attention_layers(model).items()
    ]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.enable_grad():
            with wrapper.optim_context(model):
                data = model.data_preprocessor(batch, True)
                losses = model(**data, mode="loss") if isinstance(data, dict) else model(*data, mode="loss")
            loss, _ = model.parse_losses(losses)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in buffers:
            buffer.copy_(value)
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


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(tensor.isfinite().all())


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())

"""Numbers that show whether conditioning does anything, written during training.

Scalars of the visualizer's backends (``vis_data/scalars.json``, TensorBoard, ...):

- ``conditioning/{projection}/{role}/{sigma_max,sigma_min,kappa,rank_deficient}_{before,after}``
  of W (``before``) and of W + C (``after``), in float64. ``rank_deficient`` is 1
  where sigma_min is zero at working precision; kappa is left out there.
- ``conditioning/{projection}/{role}/grad_norm`` of the gradient of W.
- ``conditioning/{attention}/{entropy,relative_entropy,largest_logit}`` on tokens
  of the training batch; entropy in nats.
- ``conditioning/seconds``, what the measurement took.

``{projection}`` and ``{attention}`` are module names, ``{role}`` is q, k or v. A
value that is not finite is no JSON: it is left out, and ``{name}_non_finite`` is 1.
"""

import math
import re
import time
from collections.abc import Sequence
from functools import partial

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor, nn

from mmspectral.analysis.projections import AttentionProjection, attention_projections, spread
from mmspectral.layers import attention_layers, saturation
from mmspectral.registry import HOOKS

STATISTICS = ("spectrum", "attention", "gradient")
# The few numbers for the console log: which scalars each sums up.
SUMMARY = {
    "kappa_max": ("/kappa_after", max),
    "rank_deficient": ("/rank_deficient_after", sum),
    "entropy_min": ("/relative_entropy", min),
    "logit_max": ("/largest_logit", max),
}


@HOOKS.register_module()
class ConditioningHook(Hook):
    """Log spectra, attention entropy and gradient norms of attention layers, on rank 0.

    A stock twin logs the same names (:func:`mmspectral.analysis.projections.attention_projections`). The module
    docstring lists the scalars; the console log gets only ``kappa_max``, ``rank_deficient`` (a count),
    ``entropy_min`` (relative) and ``logit_max``, through the message hub.

    Spectra are those of the weights before training and after every n-th iteration. Attention is measured on what its
    layer gets in that iteration's forward pass, in the precision of that pass, without the mask of shifted windows;
    hooks do not reach a model that was compiled before. Gradients are those that the optimizer gets (clipped,
    unscaled) in the first update from then on, which under gradient accumulation may be a later iteration.

    Cost of a measured iteration: per layer and role two singular value decompositions (without vectors) on the CPU,
    one more projection and softmax of ``max_samples`` samples per attention layer, and one norm per gradient.
    Other ranks wait for rank 0.

    Args:
        interval: Measure every n iterations, or in the last iteration of every
            n-th epoch with ``by_epoch`` (for epoch-based loops).
        by_epoch: What ``interval`` counts.
        layers: Regular expression, searched in the names of attention layers
            (such as ``backbone.xca_layers.0.attn``); None takes all.
        max_layers: Layers measured at most: evenly spaced ones of those.
        statistics: Any of ``"spectrum"``, ``"attention"``, ``"gradient"``.
        max_samples: Samples (windows, for window attention) per attention layer, evenly spaced over the batch.
        max_tokens: Tokens per sample in attention among tokens, evenly spaced; at least the size of a window.

    Raises:
        ValueError: A setting is out of range, or the model has nothing to measure.
    """

    priority = "NORMAL"

    def __init__(
        self,
        interval: int = 500,
        by_epoch: bool = False,
        layers: str | None = None,
        max_layers: int = 4,
        statistics: Sequence[str] = STATISTICS,
        max_samples: int = 2,
        max_tokens: int = 1024,
    ) -> None:
        limits = dict(interval=interval, max_layers=max_layers, max_samples=max_samples, max_tokens=max_tokens)
        for name, value in limits.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"ConditioningHook: {name} must be a positive integer, got {value!r}.")
        if isinstance(statistics, str) or not statistics or not set(statistics) <= set(STATISTICS):
            raise ValueError(f"ConditioningHook: statistics must be a list out of {STATISTICS}, got {statistics!r}.")
        self.interval = interval
        self.by_epoch = by_epoch
        self.layers = layers
        self.max_layers = max_layers
        self.statistics = tuple(statistics)
        self.max_samples = max_samples
        self.max_tokens = max_tokens
        self._forward_handles = []
        self._step_handles = {}  # optimizer -> handle of its step hook
        self._stepped = set()
        self._scalars = {}
        self._seconds = 0.0

    def before_train(self, runner: Runner) -> None:
        """Choose the layers and log the spectra of the start."""
        if not is_main_process():
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._choose(model)
        if "spectrum" in self.statistics:
            self._measure_spectra()
            self._write(runner, step=runner.iter)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Put hooks where activations and gradients pass, in measured iterations only."""
        if not is_main_process() or not self._due(runner, batch_idx):
            return
        if "attention" in self.statistics:
            self._forward_handles = [
                layer.register_forward_pre_hook(partial(self._measure_attention, name), with_kwargs=True)
                for name, layer in self._attentions.items()
            ]
        if "gradient" in self.statistics:
            wrapper = runner.optim_wrapper
            wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
            for optimizer in (each.optimizer for each in wrappers):
                if optimizer not in self._step_handles:
                    self._step_handles[optimizer] = optimizer.register_step_pre_hook(self._gradient_hook)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        """Measure the weights and write what was collected."""
        if not is_main_process():
            return
        for handle in self._forward_handles:
            handle.remove()
        self._forward_handles = []
        for optimizer in self._stepped:
            self._step_handles.pop(optimizer).remove()
        self._stepped.clear()
        if "spectrum" in self.statistics and self._due(runner, batch_idx):
            self._measure_spectra()
        if self._scalars:
            self._write(runner, step=runner.iter + 1)

    def after_train(self, runner: Runner) -> None:
        """Take back a step hook that no update followed."""
        for handle in self._step_handles.values():
            handle.remove()
        self._step_handles = {}

    def _due(self, runner: Runner, batch_idx: int) -> bool:
        if self.by_epoch:
            return self.every_n_epochs(runner, self.interval) and self.end_of_epoch(runner.train_dataloader, batch_idx)
        return self.every_n_train_iters(runner, self.interval)

    def _choose(self, model: nn.Module) -> None:
        projections, attentions = attention_projections(model), attention_layers(model)
        names = list(dict.fromkeys([*(name.rpartition(".")[0] for name in projections), *attentions]))
        if not names:
            raise ValueError(
                f"ConditioningHook: {type(model).__name__} has no attention layer that can be measured; see "
                "mmspectral.analysis.projections.attention_projections for what is found, or remove the hook."
            )
        matching = [name for name in names if self.layers is None or re.search(self.layers, name)]
        if not matching:
            raise ValueError(
                f"ConditioningHook: no attention layer matches layers={self.layers!r}; there are {', '.join(names)}."
            )
        chosen = spread(matching, self.max_layers)
        self._projections: list[AttentionProjection] = [
            projection for name, projection in projections.items() if name.rpartition(".")[0] in chosen
        ]
        self._attentions = {name: attentions[name] for name in chosen if name in attentions}

    def _measure_spectra(self) -> None:
        start = time.perf_counter()
        for projection in self._projections:
            for role, (before, after) in projection.spectra().items():
                for suffix, found in (("before", before), ("after", after)):
                    prefix = f"conditioning/{projection.name}/{role}"
                    self._scalars[f"{prefix}/sigma_max_{suffix}"] = found.sigma_max
                    self._scalars[f"{prefix}/sigma_min_{suffix}"] = found.sigma_min
                    self._scalars[f"{prefix}/rank_deficient_{suffix}"] = int(found.rank_deficient)
                    if not found.rank_deficient:
                        self._scalars[f"{prefix}/kappa_{suffix}"] = found.kappa
        self._seconds += time.perf_counter() - start

    def _measure_attention(self, name: str, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        if f"conditioning/{name}/entropy" in self._scalars:
            return  # gradient checkpointing runs the forward pass twice
        start = time.perf_counter()
        training = {part: part.training for part in layer.modules()}
        for part in training:
            part.training = False  # else it changes state, such as the vectors of a power iteration
        try:
            with torch.no_grad():
                tokens = args[0] if args else next(iter(kwargs.values()))
                found = saturation(layer.attention_logits(self._part(layer, tokens)))
        finally:
            for part, mode in training.items():
                part.training = mode
        for statistic in ("entropy", "relative_entropy", "largest_logit"):
            self._scalars[f"conditioning/{name}/{statistic}"] = getattr(found, statistic)
        self._seconds += time.perf_counter() - start

    def _part(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        B, N = tokens.shape[:2]
        tokens = tokens[:: math.ceil(B / self.max_samples)]
        # Logits among channels are sums over all tokens, and small; only those among tokens grow with N^2.
        if self.max_tokens < N and layer.attention_logits(tokens[:1, :1]).shape[-1] == 1:
            tokens = tokens[:, :: math.ceil(N / self.max_tokens)]
        return tokens

    def _gradient_hook(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if optimizer in self._stepped:
            return
        start = time.perf_counter()
        # A fused optimizer under a GradScaler unscales in its kernel, after this hook.
        scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else scale.item()
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for projection in self._projections:
            if id(projection.weight) in own:
                for role, norm in projection.gradient_norms().items():
                    self._scalars[f"conditioning/{projection.name}/{role}/grad_norm"] = norm / scale
        self._stepped.add(optimizer)
        self._seconds += time.perf_counter() - start

    def _write(self, runner: Runner, step: int) -> None:
        scalars, self._scalars = self._scalars, {}
        finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
        flags = {f"{name}_non_finite": 1 for name in scalars.keys() - finite.keys()}
        runner.visualizer.add_scalars({**finite, **flags, "conditioning/seconds": self._seconds}, step=step)
        self._seconds = 0.0
        for name, (ending, reduce) in SUMMARY.items():
            values = [value for key, value in finite.items() if key.endswith(ending)]
            if values:
                runner.message_hub.update_scalar(f"train/{name}", reduce(values))

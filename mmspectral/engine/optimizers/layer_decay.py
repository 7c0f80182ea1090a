"""Learning rates that fall with the distance of a layer from the output."""

import logging
from dataclasses import dataclass

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm, _InstanceNorm
from torch import nn

from mmspectral.registry import OPTIM_WRAPPER_CONSTRUCTORS

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
OPTIONS = ("layer_decay_rate", "norm_decay_mult", "bias_decay_mult", "flat_decay_mult", "custom_keys")
CUSTOM_OPTIONS = ("lr_mult", "decay_mult")


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Layer-wise learning-rate decay for any model that holds a backbone with ``get_layer_depth``.

    A parameter of depth i of n trains at lr * rate^(n - 1 - i); what is not in
    a backbone (neck, heads) trains at lr. The backbone may be the model itself or
    lie anywhere in it. mmpretrain's constructor asks the model instead of the
    backbone and so refuses detectors; mmdet's knows ConvNeXt alone.

    ``paramwise_cfg`` holds ``layer_decay_rate`` in (0, 1] and optionally, with
    mmengine's meaning:

    - ``norm_decay_mult``, ``bias_decay_mult``, ``flat_decay_mult``: factors of the
      weight decay for norms, other biases, other one-dimensional parameters;
    - ``custom_keys``: dicts of ``lr_mult`` and ``decay_mult`` by substring of the
      parameter's name; the longest match wins, over the three above too.

    Parameters that the backbone names in ``no_weight_decay()`` are not decayed
    unless a custom key gives them a ``decay_mult``.

    Raises:
        ValueError: The optimizer has no ``lr``, ``paramwise_cfg`` lacks the rate,
            holds an unknown option or changes a weight decay that is not set,
            or nothing in the model has ``get_layer_depth``.
    """

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = "", **kwargs) -> None:
        """Append one group per depth and setting to ``params``, which hold every trainable parameter once."""
        backbones = _backbones(module)
        groups: dict[tuple, dict] = {}
        seen: set[nn.Parameter] = set()
        for path, owner in module.named_modules():
            for leaf, parameter in owner.named_parameters(recurse=False):
                if parameter in seen or not parameter.requires_grad:
                    continue
                seen.add(parameter)
                name = f"{path}.{leaf}" if path else leaf
                depth, lr_scale, decays = _place(name, backbones, self.paramwise_cfg["layer_decay_rate"])
                custom = self._custom(f"{prefix}{name}")
                lr = self.base_lr * lr_scale * (custom or {}).get("lr_mult", 1.0)
                group = dict(params=[], lr=lr)
                if self.base_wd is not None:
                    group["weight_decay"] = self.base_wd * self._decay_mult(owner, leaf, parameter, custom, decays)
                key = (depth, lr, group.get("weight_decay"))
                groups.setdefault(key, group)["params"].append(parameter)
        ordered = sorted(groups.items(), key=lambda item: item[0][:2])
        _log(ordered)
        params.extend(group for _, group in ordered)

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        name = type(self).__name__
        unknown = sorted(set(self.paramwise_cfg) - set(OPTIONS))
        if unknown:
            raise ValueError(
                f"{name}: paramwise_cfg has no option {', '.join(unknown)}; it takes {', '.join(OPTIONS)}."
            )
        rate = self.paramwise_cfg.get("layer_decay_rate")
        if rate is None or not 0 < rate <= 1:
            raise ValueError(f"{name}: paramwise_cfg needs layer_decay_rate in (0, 1], for example 0.7; got {rate!r}.")
        if self.base_lr is None:
            raise ValueError(f"{name}: the optimizer needs an lr that can be scaled.")
        if self.base_wd is None and "flat_decay_mult" in self.paramwise_cfg:
            raise ValueError(f"{name}: flat_decay_mult needs a weight_decay in the optimizer.")
        for key, settings in self.paramwise_cfg.get("custom_keys", {}).items():
            unknown = sorted(set(settings) - set(CUSTOM_OPTIONS))
            if unknown:
                raise ValueError(f"{name}: custom key {key!r} takes lr_mult and decay_mult, not {', '.join(unknown)}.")

    def _custom(self, name: str) -> dict | None:
        keys = self.paramwise_cfg.get("custom_keys", {})
        matching = [key for key in sorted(keys) if key in name]
        return keys[max(matching, key=len)] if matching else None

    def _decay_mult(
        self, owner: nn.Module, leaf: str, parameter: nn.Parameter, custom: dict | None, decays: bool
    ) -> float:
        if custom is not None and "decay_mult" in custom:
            return custom["decay_mult"]
        if not decays:
            return 0.0
        if custom is not None:
            return 1.0
        kinds = dict(norm=isinstance(owner, NORMS), bias=leaf == "bias", flat=parameter.ndim == 1)
        options = (f"{kind}_decay_mult" for kind, fits in kinds.items() if fits)
        return next((self.paramwise_cfg[option] for option in options if option in self.paramwise_cfg), 1.0)


@dataclass(frozen=True)
class _Backbone:
    module: nn.Module
    undecayed: frozenset[str]  # names, whole or of the last part


def _backbones(model: nn.Module) -> dict[str, _Backbone]:
    """Return the modules that place their parameters, by prefix of the parameters' names.

    A classifier of mmpretrain has ``get_layer_depth`` too, but only passes the
    question on to its backbone.
    """
    found = {
        f"{path}." if path else "": _Backbone(module, frozenset(getattr(module, "no_weight_decay", set)()))
        for path, module in model.named_modules()
        if hasattr(module, "get_layer_depth") and not hasattr(module, "backbone")
    }
    if not found:
        backbone = type(getattr(model, "backbone", model)).__name__
        raise ValueError(
            f"layer-wise learning-rate decay needs a backbone with get_layer_depth(param_name, prefix), and nothing in "
            f"{type(model).__name__} has it (backbone: {backbone}). Use a backbone of mmspectral, one of mmpretrain "
            "that has the method, or mmengine's default constructor."
        )
    return found


def _place(name: str, backbones: dict[str, _Backbone], rate: float) -> tuple[float, float, bool]:
    """Return (depth, factor of the learning rate, whether weight decay applies); depth is infinite outside."""
    prefix = max((prefix for prefix in backbones if name.startswith(prefix)), key=len, default=None)
    if prefix is None:
        return float("inf"), 1.0, True
    backbone, name = backbones[prefix], name.removeprefix(prefix)
    depth, num_depths = backbone.module.get_layer_depth(name, "")
    decays = not {name, name.rpartition(".")[2]} & backbone.undecayed
    return depth, rate ** (num_depths - 1 - depth), decays


def _log(groups: list[tuple[tuple, dict]]) -> None:
    lines = []
    for (depth, lr, weight_decay), group in groups:
        place = "neck and heads" if depth == float("inf") else f"depth {depth}"
        decay = "" if weight_decay is None else f", weight decay {weight_decay:.3g}"
        tensors, numbers = len(group["params"]), sum(parameter.numel() for parameter in group["params"])
        lines.append(f"{place}: lr {lr:.3g}{decay}, tensors: {tensors}, parameters: {numbers:,}")
    print_log("Layer-wise learning-rate decay\n  " + "\n  ".join(lines), "current", logging.INFO)

"""Learning rates that fall with the distance of a layer from the output."""

import functools
import logging

from mmengine.logging import print_log
from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor
from torch import nn

from mmspectral.registry import OPTIM_WRAPPER_CONSTRUCTORS

OPTIONS = ("layer_decay_rate", "norm_decay_mult", "bias_decay_mult", "flat_decay_mult", "custom_keys")
CUSTOM_OPTIONS = ("lr_mult", "decay_mult")
_OUTSIDE = 10**6  # the depth of what is in no backbone


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(LearningRateDecayOptimWrapperConstructor):
    """mmpretrain's layer-wise learning-rate decay, for any model that holds a backbone with ``get_layer_depth``.

    A parameter of depth i of n trains at lr * rate^(n - 1 - i); what is not in a backbone (neck, heads) trains at lr.
    mmpretrain's class asks the model instead of the backbone and so refuses detectors; mmdet's knows ConvNeXt alone.

    ``paramwise_cfg`` is that of mmpretrain, and more: ``layer_decay_rate`` is required, an unknown option is an error,
    ``custom_keys`` take ``lr_mult`` too, and parameters that the backbone names in ``no_weight_decay()`` are not
    decayed unless a custom key gives them a ``decay_mult``. Equal settings of one depth make one group.

    Raises:
        ValueError: The optimizer has no ``lr``, ``paramwise_cfg`` lacks the rate,
            holds an unknown option or changes a weight decay that is not set,
            or nothing in the model has ``get_layer_depth``.
    """

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = "", get_layer_depth=None, **kwargs):
        """Append one group per depth and setting to ``params``, which hold every trainable parameter once."""
        if get_layer_depth is not None:  # mmpretrain's method goes on with a child
            super().add_params(params, module, prefix, get_layer_depth, **kwargs)
            return
        backbones = _backbones(module, prefix)
        single: list[dict] = []
        base_wd, self.base_wd = self.base_wd, self.base_wd or 0.0  # mmpretrain's log fails without one
        super().add_params(single, module, prefix, functools.partial(_depth, backbones))
        self.base_wd = base_wd
        groups: dict[tuple, dict] = {}
        seen: set[nn.Parameter] = set()
        for entry in single:
            (parameter,) = entry["params"]
            if parameter in seen:
                continue
            seen.add(parameter)
            custom = self._custom(entry["param_name"])
            group = dict(params=[], lr=entry["lr"] * custom.get("lr_mult", 1.0))
            if base_wd is not None:
                kept = "decay_mult" in custom or not _undecayed(backbones, entry["param_name"])
                group["weight_decay"] = entry["weight_decay"] if kept else 0.0
            key = (entry["layer_id"], group["lr"], group.get("weight_decay"))
            groups.setdefault(key, group)["params"].append(parameter)
        ordered = sorted(groups.items(), key=lambda item: item[0][:2])
        _log(ordered)
        params.extend(group for _, group in ordered)

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        name = type(self).__name__
        _require_known(f"{name}: paramwise_cfg", self.paramwise_cfg, OPTIONS)
        for key, settings in self.paramwise_cfg.get("custom_keys", {}).items():
            _require_known(f"{name}: custom key {key!r}", settings, CUSTOM_OPTIONS)
        rate = self.paramwise_cfg.get("layer_decay_rate")
        if rate is None or not 0 < rate <= 1:
            raise ValueError(f"{name}: paramwise_cfg needs layer_decay_rate in (0, 1], for example 0.7; got {rate!r}.")
        if self.base_lr is None:
            raise ValueError(f"{name}: the optimizer needs an lr that can be scaled.")
        if self.base_wd is None and "flat_decay_mult" in self.paramwise_cfg:
            raise ValueError(f"{name}: flat_decay_mult needs a weight_decay in the optimizer.")

    def _custom(self, name: str) -> dict:
        """Return the settings of the longest custom key in ``name``, mmengine's rule."""
        keys = self.paramwise_cfg.get("custom_keys", {})
        return keys.get(max((key for key in sorted(keys) if key in name), key=len, default=None), {})


def _require_known(where: str, settings: dict, known: tuple[str, ...]) -> None:
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{where} has no option {', '.join(unknown)}; it takes {', '.join(known)}.")


def _backbones(model: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Return the modules that know the depth of their parameters, by prefix of the parameters' names.

    A classifier of mmpretrain has ``get_layer_depth`` too, but only passes the
    question on to its backbone.
    """
    found = {
        f"{prefix}{path}." if path else prefix: module
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


def _owner(backbones: dict[str, nn.Module], name: str) -> str | None:
    return max((prefix for prefix in backbones if name.startswith(prefix)), key=len, default=None)


def _depth(backbones: dict[str, nn.Module], name: str) -> tuple[int, int]:
    """Return the depth of a parameter and the number of depths; outside of backbones it is beyond all, at full rate."""
    prefix = _owner(backbones, name)
    return (_OUTSIDE, _OUTSIDE + 1) if prefix is None else backbones[prefix].get_layer_depth(name, prefix)


def _undecayed(backbones: dict[str, nn.Module], name: str) -> bool:
    prefix = _owner(backbones, name)
    names = getattr(backbones.get(prefix), "no_weight_decay", set)()
    return prefix is not None and not {name.removeprefix(prefix), name.rpartition(".")[2]}.isdisjoint(names)


def _log(groups: list[tuple[tuple, dict]]) -> None:
    lines = []
    for (depth, lr, weight_decay), group in groups:
        place = "neck and heads" if depth == _OUTSIDE else f"depth {depth}"
        decay = "" if weight_decay is None else f", weight decay {weight_decay:.3g}"
        tensors, numbers = len(group["params"]), sum(parameter.numel() for parameter in group["params"])
        lines.append(f"{place}: lr {lr:.3g}{decay}, tensors: {tensors}, parameters: {numbers:,}")
    print_log("Layer-wise learning-rate decay\n  " + "\n  ".join(lines), "current", logging.INFO)

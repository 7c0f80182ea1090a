"""Common parts of the backbones: loading, recomputed blocks, the warning of saturated attention."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Sequence

import torch
from mmcv.cnn.bricks import DropPath
from mmengine.logging import print_log
from mmengine.model.weight_init import PretrainedInit
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from mmspectral.checkpoints import load_backbone
from mmspectral.layers import attention_layers, probe_tokens, replaced_projections, saturation
from mmspectral.models.attention.adopt import adopt

SATURATED = 0.05  # of maximal entropy


class ConditionedBackbone:
    """Mix-in of the conditioned backbones; put it before mmpretrain's class.

    The class supplies ``with_cp``, whether blocks are recomputed in the backward
    pass; its constructor ends with :meth:`finish`. With ``init_cfg=dict(type='Pretrained',
    checkpoint=..., prefix=...)`` weights are first initialised from scratch, then loaded by
    :func:`mmspectral.checkpoints.load.load_backbone`, whose other arguments
    (``trained_with_conditioning``, ``min_matched``) the dict may also hold.
    """

    scratch_init_cfg = dict(type="TruncNormal", layer="Linear", std=0.02, bias=0.0)  # as in the official codes
    with_cp: bool
    norm_eval = False
    whole_depths: dict[str, int]  # entries of each list of blocks or stages in the whole model, before any is cut
    probe_length = 196  # tokens that one attention sees: 224-pixel images in patches of 16

    def init_weights(self) -> None:
        """Initialise from scratch, then load the checkpoint that ``init_cfg`` names, if any; only the first time.

        At a second call mmpretrain's would re-initialise class token and position embedding.
        """
        if self.is_init:
            return
        given = self.init_cfg
        entries = given if isinstance(given, (list, tuple)) else [given] if given else []
        pretrained = [entry for entry in entries if _is_pretrained(entry)]
        scratch = [entry for entry in entries if entry not in pretrained]
        self.init_cfg = scratch or self.scratch_init_cfg
        self._init_from_scratch()
        self.init_cfg = given
        for entry in pretrained:
            load_backbone(self, **{key: value for key, value in entry.items() if key not in ("type", "map_location")})

    def _init_from_scratch(self) -> None:
        super().init_weights()

    def train(self, mode: bool = True) -> ConditionedBackbone:
        """Set training mode, keeping frozen stages (and batch norms, with ``norm_eval``) in eval mode."""
        super().train(mode)
        self._freeze_stages()
        for module in self.modules() if mode and self.norm_eval else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    @property
    def conditioning(self) -> dict | None:
        """Settings of what changes the projections, or None."""
        for projection in replaced_projections(self).values():
            return projection.conditioning.settings()
        return None

    def finish(self, blocks: Iterable[nn.ModuleList], recomputed: type[nn.Module] | None = None) -> None:
        """Do what every constructor ends with.

        Args:
            blocks: Lists of the blocks.
            recomputed: Class that ``with_cp`` puts in the place of a block's, see :class:`Recomputed`.
        """
        for container in blocks if self.with_cp else ():
            for i, block in enumerate(container):
                container[i] = adopt(recomputed, block)
        rates_to_float(self)
        # A hook, so that it runs behind mmpretrain's, which look at the whole file.
        self._register_load_state_dict_pre_hook(_drop_cut, with_module=True)
        self._freeze_stages()
        self.warn_if_saturated()

    def is_cut(self, name: str) -> bool:
        """Return whether a parameter of the whole model belongs to a part that this one does not build."""
        return False

    def may_lack(self, name: str) -> bool:
        """Return whether a parameter starts as initialised where a checkpoint does not have it."""
        return False

    def warn_if_saturated(self) -> None:
        """Warn when attention starts one-hot; call it at the end of ``__init__``.

        Measures the first conditioned layer of each attention class on probe
        tokens of correlation .5, at the weights it has then (torch's default
        initialisation); the correction decides.
        """
        conditioned = {name: layer for name, layer in attention_layers(self).items() if replaced_projections(layer)}
        first_of_class = {type(layer): (name, layer) for name, layer in reversed(conditioned.items())}
        for name, layer in first_of_class.values():
            projection = next(iter(replaced_projections(layer).values()))
            if projection.weight.is_meta:
                continue
            tokens = probe_tokens(self.probe_length, projection.in_features, correlation=0.5)
            with torch.no_grad():
                measured = saturation(layer.attention_logits(tokens.to(projection.weight)))
            if measured.relative_entropy < SATURATED:
                warnings.warn(
                    f"{type(self).__name__} with {projection.conditioning}: attention of {name} starts with "
                    f"{100 * measured.relative_entropy:.1f} % of the entropy of uniform attention on tokens of "
                    f"correlation 0.5 (largest logit {measured.largest_logit:.0f}): nearly one-hot, which mostly "
                    "trains badly. Use a smaller scale, targets=('v',), or preserve_norm; "
                    "see the saturation table in the README.",
                    stacklevel=3,
                )


class StagedBackbone(ConditionedBackbone):
    """The same for backbones of stages, of which those after the last output are not kept."""

    @property
    def out_channels(self) -> list[int]:
        """Channels of each output."""
        return [self.num_features[i] for i in self.out_indices]

    @classmethod
    def settings_of(cls, arch: str | dict) -> dict:
        """Return ``embed_dims``, ``depths`` and ``num_heads`` of ``arch``.

        Raises:
            ValueError: Unknown, or not these three.
        """
        settings = cls.arch_zoo.get(arch.lower()) if isinstance(arch, str) else arch
        if not isinstance(settings, dict) or set(settings) != {"embed_dims", "depths", "num_heads"}:
            raise ValueError(
                f"unknown {cls.__name__} arch {arch!r}; choose {', '.join(cls.arch_zoo)} "
                "or give a dict of embed_dims, depths and num_heads."
            )
        return settings

    def is_cut(self, name: str) -> bool:
        head, _, rest = name.partition(".")
        if head == "stages":
            last = len(self.stages) - 1
            later = last < index_in(rest) < self.whole_depths["stages"]
            return later or (rest.startswith(f"{last}.downsample.") and self.stages[last].downsample is None)
        return re.fullmatch(r"norm\d+", head) is not None and not hasattr(self, head)

    def may_lack(self, name: str) -> bool:
        """The norms of maps before the last, which a classifier does not have."""
        found = re.match(r"norm(\d+)\.", name)
        return found is not None and int(found[1]) < self.whole_depths["stages"] - 1

    def _count_blocks(self) -> None:
        """Note how deep the model is; before anything is cut."""
        depths = {f"stages.{i}.blocks": len(stage.blocks) for i, stage in enumerate(self.stages)}
        self.whole_depths = {"stages": len(self.stages), **depths}

    def _freeze_stages(self) -> None:
        n = self.frozen_stages
        if n >= 0:
            norms = [getattr(self, f"norm{i}") for i in self.out_indices if i <= n]
            freeze([self.patch_embed, *self.stages[: n + 1], *norms])


class Recomputed:
    """Mix-in of blocks that are recomputed in the backward pass; put it before the block's class.

    Non-reentrant, where mmpretrain's ``with_cp`` is reentrant and does not go with DistributedDataParallel.
    """

    def forward(self, *inputs: Tensor | int | tuple[int, int]) -> Tensor:
        """Call the block's forward, keeping only its inputs where gradients are wanted."""
        if torch.is_grad_enabled():
            return checkpoint(super().forward, *inputs, use_reentrant=False)
        return super().forward(*inputs)


def _drop_cut(module: ConditionedBackbone, state_dict: dict, prefix: str, *_: object) -> None:
    """Leave out of a checkpoint of the whole model what ``module`` does not build."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if module.is_cut(name.removeprefix(prefix)):
            del state_dict[name]


def _is_pretrained(entry: dict) -> bool:
    kind = entry.get("type")
    return kind is PretrainedInit or (isinstance(kind, str) and kind.rpartition(".")[2] == "Pretrained")


def index_in(name: str) -> int:
    """Return the number with which a dotted name begins, or -1."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def usable_norm_cfg(norm_cfg: dict | None) -> dict | None:
    """Return ``norm_cfg`` with SyncBN replaced by BN where there is no CUDA.

    ``torch.nn.SyncBatchNorm`` refuses CPU tensors as soon as a process group
    exists. Names and shapes of parameters are the same for both.
    """
    if norm_cfg is None or norm_cfg.get("type") not in ("SyncBN", "MMSyncBN") or torch.cuda.is_available():
        return norm_cfg
    print_log(
        f"{norm_cfg['type']} needs CUDA: using BN, with statistics of each process alone.", "current", logging.INFO
    )
    return dict(norm_cfg, type="BN")


def freeze(modules: Iterable[nn.Module]) -> None:
    """Put modules in eval mode and take their parameters out of training."""
    for module in modules:
        module.eval()
        for parameter in module.parameters():
            parameter.requires_grad = False


def resolve_indices(indices: int | Sequence[int], count: int, part: str, detail: str = "") -> list[int]:
    """Return ``out_indices`` as numbers from 0 on.

    Args:
        indices: One or more; negative ones count from the end.
        count: How many blocks or stages there are.
        part: ``"block"`` or ``"stage"``, for the message.
        detail: What the message adds to the count.

    Raises:
        ValueError: None, or one that is out of range.
    """
    indices = [indices] if isinstance(indices, int) else list(indices)
    if not indices or any(not -count <= index < count for index in indices):
        raise ValueError(
            f"out_indices {indices} must be at least one {part} of [{-count}, {count}): "
            f"there are {count} {part}s{detail}."
        )
    return [index % count for index in indices]


def check_frozen_stages(frozen_stages: int, last: int) -> None:
    """Raise a ValueError unless ``frozen_stages`` is in [-1, ``last``]."""
    if not -1 <= frozen_stages <= last:
        raise ValueError(f"frozen_stages must lie in [-1, {last}], got {frozen_stages}; -1 freezes nothing.")


def rates_to_float(model: nn.Module) -> None:
    """Take the rates of dropout and drop path out of NumPy: ``torch.compile(fullgraph=True)`` refuses its scalars."""
    for module in model.modules():
        if isinstance(module, DropPath):
            module.drop_prob = float(module.drop_prob)
        elif isinstance(module, nn.Dropout):
            module.p = float(module.p)

"""Names of Swin's weights: microsoft/Swin-Transformer (and its detection code) and timm."""

import functools
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from mmspectral.checkpoints.names.naming import Family, Naming, Rules, State, begins, final_norm, number_of

_TABLE, _INDEX = "relative_position_bias_table", "relative_position_index"
_BUFFERS = (_INDEX, "attn_mask")  # of the other code bases: they follow from window and image size


def _rules(names: Collection[str], downsample: str, head: str) -> Rules:
    stages = max(number_of("stages", names), number_of("layers", names))
    return (
        ("stages.{i}.blocks.{j}.attn.w_msa", "layers.{i}.blocks.{j}.attn"),
        ("stages.{i}.blocks.{j}.ffn.layers.0.0", "layers.{i}.blocks.{j}.mlp.fc1"),
        ("stages.{i}.blocks.{j}.ffn.layers.1", "layers.{i}.blocks.{j}.mlp.fc2"),
        ("stages.{i}.downsample", downsample),
        ("stages.{i}.blocks", "layers.{i}.blocks"),
        ("patch_embed.projection", "patch_embed.proj"),
        *final_norm(stages, names, "norm"),
        ("head.fc", head),
    )


def official_patch_merging(tensor: Tensor) -> Tensor:
    """Bring the channels of 2 x 2 patches from mmpretrain's order to the official one.

    mmpretrain merges with ``nn.Unfold``, whose order is [C, row, column];
    Microsoft's code and timm concatenate in the order [column, row, C].

    Args:
        tensor: Weight of norm or reduction, [..., 4 * C].
    """
    return tensor.unflatten(-1, (-1, 2, 2)).transpose(-1, -3).flatten(-3)


def mmpretrain_patch_merging(tensor: Tensor) -> Tensor:
    """Undo :func:`official_patch_merging`, [..., 4 * C]."""
    return tensor.unflatten(-1, (2, 2, -1)).transpose(-1, -3).flatten(-3)


def _without_buffers(reorder: Callable[[Tensor], Tensor], state: State) -> State:
    return {
        name: reorder(tensor) if ".downsample." in name else tensor
        for name, tensor in state.items()
        if not name.endswith(_BUFFERS)
    }


_on_import = functools.partial(_without_buffers, mmpretrain_patch_merging)
_on_export = functools.partial(_without_buffers, official_patch_merging)


def position_index(table: Tensor) -> Tensor | None:
    """Return the row of the bias table for each pair of positions [N, N] of a square window, or None for another.

    Args:
        table: [(2 W - 1)^2, heads] for a window of W x W = N positions.
    """
    window = (round(table.shape[0] ** 0.5) + 1) // 2 if table.ndim == 2 else 0
    if not window or (2 * window - 1) ** 2 != table.shape[0]:
        return None
    rows, columns = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    place = (rows * (2 * window - 1) + columns).flatten()  # [N]
    return place[:, None] - place[None, :] + 2 * window * (window - 1)


def _complete(state: State) -> State:
    """Add the index buffers, so that stock code loads the file with ``strict=True``."""
    completed = {}
    for name, tensor in state.items():
        completed[name] = tensor
        index = name.replace(_TABLE, _INDEX)
        if name.endswith(_TABLE) and index not in state and (found := position_index(tensor)) is not None:
            completed[index] = found
    return completed


def _begins_with_patch_merging(names: Collection[str]) -> bool:
    """timm merges at the beginning of a stage since version 0.9, Microsoft at the end of one."""
    return begins("layers.1.downsample.")(names) and not begins("layers.0.downsample.")(names)


_is_swin = begins(f"layers.0.blocks.0.attn.{_TABLE}")

FAMILY = Family(
    "swin",
    recognise=begins("stages.0.blocks.0.attn.w_msa."),
    namings=(
        Naming(
            "timm",
            recognise=lambda names: _is_swin(names) and _begins_with_patch_merging(names),
            rules=lambda names: _rules(names, "layers.{i+1}.downsample", "head.fc"),
            on_import=_on_import,
            on_export=_on_export,
        ),
        Naming(
            "official",
            recognise=_is_swin,
            rules=lambda names: _rules(names, "layers.{i}.downsample", "head"),
            on_import=_on_import,
            on_export=_on_export,
            entry="model",
        ),
        Naming(
            "mmcls",  # before September 2021, as are the 16xb64 files that mmpretrain publishes
            recognise=lambda names: begins("norm.")(names) and begins("stages.0.blocks.0.attn.w_msa.")(names),
            rules=lambda names: final_norm(number_of("stages", names), names, "norm"),
            on_import=functools.partial(_without_buffers, Tensor.contiguous),
        ),
    ),
    complete=_complete,
)

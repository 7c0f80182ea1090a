"""Fit the learned position embedding of a checkpoint to another grid of patches and other extra tokens.

An embedding is [1, T + h * w, D]: T rows for the class and the distillation
token, then the grid, row by row. A tensor does not say h and w: our files keep
them in the metadata of the state dict.
"""

import math

import torch
from mmpretrain.models.utils import resize_pos_embed
from torch import Tensor

GRID_KEY = "pos_embed_grid"
MOST_EXTRA_TOKENS = 2  # class token, distillation token

Grid = tuple[int, int]


def find_grid(length: int, stated: Grid | None, own: Grid, extra_tokens: int) -> Grid:
    """Return (h, w) of an embedding of ``length`` rows.

    Without a stated grid it is square or that of the model, and the number of
    extra tokens in the file decides between several that fit.

    Args:
        length: T + h * w.
        stated: The grid if it is known.
        own: Grid of the model that loads.
        extra_tokens: Class and distillation tokens that the file holds.

    Raises:
        ValueError: The stated grid does not fit, none fits, or two do.
    """
    if stated is not None:
        if not 0 <= length - math.prod(stated) <= MOST_EXTRA_TOKENS:
            raise ValueError(
                f"pos_embed in the checkpoint has {length} rows, but a grid of {stated[0]} x {stated[1]} patches has "
                f"{math.prod(stated)}, and at most {MOST_EXTRA_TOKENS} more for class and distillation token. "
                "Correct `pretrained_grid` (rows and columns of patches that the checkpoint was trained with)."
            )
        return stated
    found: dict[Grid, int] = {}
    for extra in range(MOST_EXTRA_TOKENS + 1):
        side = math.isqrt(max(length - extra, 0))
        if side and side * side == length - extra:
            found[side, side] = extra
    if 0 <= length - math.prod(own) <= MOST_EXTRA_TOKENS:
        found[own] = length - math.prod(own)
    if len(found) > 1:
        found = {grid: extra for grid, extra in found.items() if extra == extra_tokens} or found
    if len(found) == 1:
        return next(iter(found))
    candidates = " and ".join(f"{h} x {w}" for h, w in found) or "neither a square grid nor this model's"
    raise ValueError(
        f"pos_embed in the checkpoint has {length} rows, {extra_tokens} of them for class and distillation token, and "
        f"the file does not say its grid of patches: {candidates} would fit. State it to the backbone as "
        "`pretrained_grid=(rows, columns)`, the image size of the checkpoint's training over the patch size."
    )


def fit_pos_embed(pos_embed: Tensor, grid: Grid, own: Tensor, own_grid: Grid, mode: str) -> Tensor:
    """Return ``pos_embed`` interpolated from ``grid`` to ``own_grid``, with the extra rows of ``own``.

    Rows for tokens that the file lacks keep the values they have in ``own``;
    an embedding that fits already is returned as it is.

    Args:
        pos_embed: Embedding of the checkpoint, [1, T + h * w, D].
        grid: Its (h, w).
        own: Embedding of the model, [1, T' + h' * w', D].
        own_grid: Its (h', w').
        mode: Interpolation of ``torch.nn.functional.interpolate``.
    """
    extra = pos_embed.shape[1] - math.prod(grid)
    wanted = own.shape[1] - math.prod(own_grid)
    resized = resize_pos_embed(pos_embed, grid, own_grid, mode, extra)
    if extra == wanted:
        return resized
    kept = min(extra, wanted)
    fresh = own.detach()[:, kept:wanted].to(resized)
    return torch.cat((resized[:, :kept], fresh, resized[:, extra:]), dim=1)

"""Singular values and condition numbers of stacks of matrices."""

import torch
from torch import Tensor

from mmspectral.ops.precision import at_least_float32, without_autocast


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of [..., rows, columns], largest first, in float32 or better."""
    with without_autocast(matrix.device):
        return torch.linalg.svdvals(at_least_float32(matrix))


def condition_number(matrix: Tensor) -> Tensor:
    """Return kappa = sigma_max / sigma_min of [..., rows, columns], as :func:`condition_number_of` does."""
    return condition_number_of(singular_values(matrix), matrix.shape)


def condition_number_of(sigma: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return kappa of matrices [..., rows, columns] with the singular values ``sigma`` [..., n], largest first.

    Returns:
        A tensor [...]; infinite where the matrix is rank-deficient at working
        precision (sigma_min <= max(rows, columns) * eps * sigma_max), since the
        quotient would be a number made of rounding errors.
    """
    sigma_max, sigma_min = sigma[..., 0], sigma[..., -1]
    floor = max(shape[-2:]) * torch.finfo(sigma.dtype).eps * sigma_max
    return torch.where(sigma_min > floor, sigma_max / sigma_min, torch.inf)

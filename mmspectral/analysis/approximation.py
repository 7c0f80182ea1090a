"""How far the output of an attention is from exact softmax attention, and how much of it no more features would cure.

Relative errors are |out - target| / |target| over all queries and channels of
a head. The error against its own kernel alone says little: the flatter a
kernel is, the easier it is to estimate and the further from softmax.

Shape legend: B batch, h heads, N queries, L keys, d and e channels of keys and
values; H geometries, h or 1.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspectral.ops.random_features import softmax_attention


@dataclass(frozen=True)
class ApproximationError:
    """Relative errors of the attention output of each head over several draws of the features.

    Args:
        softmax: Against exact softmax, root mean square over the draws [h].
        own: Against exact attention with the logits of the kernel that the
            features estimate, likewise [h]; None if there is none.
        bias: Of the mean over infinitely many draws against exact softmax,
            estimated without bias as a square (0 where that is negative; NaN for
            one draw) [h].
    """

    softmax: Tensor
    own: Tensor | None
    bias: Tensor


@torch.no_grad()
def approximation_error(
    attention: Callable[[int], Tensor], exact: Tensor, draws: Iterable[int], own: Tensor | None = None
) -> ApproximationError:
    """Measure any estimator of attention.

    Args:
        attention: Returns the output [B, h, N, e] for the draw of this number.
        exact: Output of exact softmax attention [B, h, N, e].
        draws: Numbers to call ``attention`` with.
        own: Output of exact attention with the kernel of the estimator, see :func:`kernel_attention`.
    """
    exact = exact.double()
    total, squares, own_squares, count = torch.zeros_like(exact), 0.0, 0.0, 0
    for draw in draws:
        out = attention(draw).double()
        total += out - exact
        squares = squares + _energy(out - exact)
        if own is not None:
            own_squares = own_squares + _energy(out - own.double())
        count += 1
    squares, mean_square = squares / count, _energy(total / count)
    # E|mean error|^2 = |bias|^2 + variance / count, and E|error|^2 - |mean error|^2 = variance (count - 1) / count.
    bias = mean_square - (squares - mean_square) / (count - 1 or torch.nan)
    return ApproximationError(
        (squares / _energy(exact)).sqrt(),
        None if own is None else (own_squares / count / _energy(own.double())).sqrt(),
        (bias.clamp(min=0) / _energy(exact)).sqrt(),
    )


def kernel_attention(q: Tensor, k: Tensor, v: Tensor, M: Tensor, scale: float | None = None) -> Tensor:
    """Return exact attention with the logits scale q^T M^T M k, what DARK tends to as m grows, [B, h, N, e].

    Args:
        q: [B, h, N, d].
        k: [B, h, L, d].
        v: [B, h, L, e].
        M: [H, r, d]; a shift of the keys or a proposal does not change the kernel.
        scale: Default d^(-1/2).
    """
    M = M.to(q.dtype)
    return softmax_attention(q @ M.mT, k @ M.mT, v, scale=q.shape[-1] ** -0.5 if scale is None else scale)


def _energy(x: Tensor) -> Tensor:
    return x.square().sum((0, 2, 3))

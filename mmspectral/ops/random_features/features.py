r"""Positive random features of the kernel exp(q^T Sigma k), Sigma = M^T M (arXiv 2603.04127, eq. 3), ready for use.

With omega ~ N(0, I_r), phi(x) = exp(omega^T M x - |M x|^2 / 2) satisfies
E[phi(q) phi(k)] = exp(q^T Sigma k). Three things change how far a finite
number m of features is from that, and none changes the mean:

* blocks of orthogonal omega instead of independent ones (arXiv 2009.14794);
* a shift c of the keys: exp(q^T Sigma (k - c)) differs by a factor per query,
  which the normalisation of attention removes;
* another Gaussian to draw from, N(0, V diag(sigma) V^T), with the square root
  of the density ratio in each phi (:class:`Proposal`).

:func:`fold_features` brings all of them into one form,
log phi_j(x) = row_j^T x - |M x|^2 / 2 + log_weight_j / 2, so that attention
needs one matrix product per token.

Shape legend: B batch, h heads, N queries, L keys, d channels per head, r rank
of M (d unless chosen smaller), m features; H is h, or 1 if all heads share.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mmspectral.ops.precision import without_autocast


class Proposal(NamedTuple):
    """A Gaussian N(0, V diag(sigma) V^T) of which the features are drawn instead of N(0, I).

    Args:
        basis: V [..., r, r], orthogonal.
        variance: sigma [..., r], positive.
    """

    basis: Tensor
    variance: Tensor


class Features(NamedTuple):
    """Random features with M, scale, proposal and shift folded in; made by :func:`fold_features`.

    Args:
        rows: [H, R, d], in float32 or float64. The last m are the features.
            The first r are those whose weighted squares sum to |M x|^2: rows
            of their own (R = r + m), or the first block of the features
            themselves (R = m).
        norm_weight: [H, r], the weights in that sum.
        log_weight: [H, m], twice the logarithm of each feature's weight.
        shift: c [H, d], subtracted from the keys, or None.
    """

    rows: Tensor
    norm_weight: Tensor
    log_weight: Tensor
    shift: Tensor | None

    @property
    def num_features(self) -> int:
        """Number of features m."""
        return self.log_weight.shape[-1]


def draw_projection(
    num_features: int,
    dim: int,
    seed: int,
    layer: int = 0,
    counter: int = 0,
    orthogonal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw omega_1 .. omega_m, each N(0, I), as a pure function of the arguments.

    Orthogonal blocks are the rows of Q^T of a QR decomposition whose R has a
    positive diagonal: without that sign Q is not Haar-distributed. Lengths come
    from the chi distribution with ``dim`` degrees of freedom, drawn apart. The
    draw is made on the CPU in float64, so that every rank and device has the same.

    Args:
        num_features: m; blocks of ``dim`` rows are orthogonal, the last may be short.
        dim: r.
        seed: Any integer of a run.
        layer: Index of the attention layer.
        counter: How often the layer has been redrawn.
        orthogonal: Whether to use orthogonal blocks rather than independent rows.
        dtype: Of the result.

    Returns:
        w [m, r] on the CPU.

    Raises:
        ValueError: No feature, no dimension, or a negative layer or counter.
    """
    if num_features < 1 or dim < 1:
        raise ValueError(f"a projection needs at least one feature and one dimension, got {num_features} and {dim}.")
    generator = torch.Generator().manual_seed(_mix(seed, layer, counter))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    if not orthogonal:
        return normal(num_features, dim).to(dtype)
    blocks = -(-num_features // dim)
    Q, R = torch.linalg.qr(normal(blocks, dim, dim))
    directions = (Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).mT.reshape(-1, dim)
    lengths = normal(blocks * dim, dim).norm(dim=-1, keepdim=True)
    return (directions * lengths)[:num_features].to(dtype)


def sharp_proposal(second_moment: Tensor) -> Proposal:
    """Return the proposal of the dense-exponential features (FAVOR#, arXiv 2302.00787) for given data.

    Per eigendirection of z = M (q + k - c), with lambda = E[z^2], the second
    moment of one feature product is, up to what does not depend on sigma,
    sigma (2 sigma - 1)^(-1/2) exp(2 sigma z^2 / (2 sigma - 1)). With
    u = 2 sigma - 1 the mean of its logarithm is least where
    u^2 - (1 + 2 lambda) u - 2 lambda = 0. In the paper's terms
    sigma = 1 - 4 a, a = (1 - u) / 8.

    Args:
        second_moment: E[z z^T] [..., r, r] (scale included, see :func:`fold_features`).
    """
    lambda_, V = torch.linalg.eigh(second_moment.double())
    lambda_ = lambda_.clamp(min=0)
    linear = 1 + 2 * lambda_
    u = (linear + (linear.square() + 8 * lambda_).sqrt()) / 2
    return Proposal(V, (1 + u) / 2)


def theorem_3_2_proposal(covariance: Tensor) -> Proposal:
    """Return the proposal of least variance for q, k ~ N(0, Lambda): sigma = (1 + 2 lambda) / (1 - 2 lambda).

    Source: arXiv 2603.04127, Theorem 3.2, as it stands.

    Args:
        covariance: Lambda of M q and M k [..., r, r] (scale included).

    Raises:
        ValueError: An eigenvalue reaches 1/2, where every proposal has infinite variance.
    """
    lambda_, V = torch.linalg.eigh(covariance.double())
    if lambda_.max() >= 0.5:
        raise ValueError(
            f"Theorem 3.2 needs all eigenvalues of Lambda below 1/2, the largest is {lambda_.max().item():.4g}. "
            "Scale M down, or use sharp_proposal, which exists for any data."
        )
    lambda_ = lambda_.clamp(min=0)
    return Proposal(V, (1 + 2 * lambda_) / (1 - 2 * lambda_))


def fold_features(
    w: Tensor,
    M: Tensor | None,
    head_dim: int,
    scale: float | None = None,
    shift: Tensor | None = None,
    proposal: Proposal | None = None,
    orthogonal: bool = False,
) -> Features:
    """Fold everything that attention needs to know of the features into one matrix per head.

    ``scale`` multiplies the logits q^T Sigma k and is used nowhere else: M is
    replaced by scale^(1/2) M, and moments given to proposals must be those of
    scale^(1/2) M x.

    Differentiable in ``w``, ``M`` and ``shift``. Folds in float64, which neither
    autocast nor TF32 touches and which costs nothing for matrices this small;
    the result is float32 (float64 for float64 ``w``).

    Args:
        w: omega [m, r] or, per head, [h, m, r].
        M: [r, d] for all heads, [h, r, d] per head, a scalar tensor t for t I, or None for I.
        head_dim: d.
        scale: Default d^(-1/2).
        shift: c [d] or [h, d], subtracted from the keys.
        proposal: What to draw from instead of N(0, I); per head if its tensors are.
        orthogonal: The first r rows of ``w`` are orthogonal, as
            :func:`draw_projection` makes them, and fixed: |M x|^2 is then read off
            their features. Ignored where it does not hold: with a
            proposal, m < r, ``w`` trained or in half precision.

    Raises:
        ValueError: Shapes that do not fit.
    """
    dtype = torch.float64 if w.dtype == torch.float64 else torch.float32
    with without_autocast(w.device):
        M = _geometry(M, w, head_dim) * (head_dim**-0.5 if scale is None else scale) ** 0.5  # [H, r, d]
        omega = w.double().view(-1, *w.shape[-2:])  # [H, m, r]
        m, r = omega.shape[-2:]
        log_weight = omega.new_zeros(1, m)
        mixed = omega
        if proposal is not None:
            V, sigma = (t.to(omega) for t in proposal)
            V, sigma = V.view(-1, r, r), sigma.view(-1, 1, r)
            mixed = (omega * sigma.sqrt()) @ V.mT
            log_weight = ((1 - sigma) * omega.square() + sigma.log()).sum(-1) / 2
        heads = {len(t) for t in (mixed, M, *(() if shift is None else (shift.view(-1, head_dim),)))} - {1}
        if len(heads) > 1:
            raise ValueError(f"w, M, shift and proposal are for different numbers of heads: {sorted(heads)}.")
        H = heads.pop() if heads else 1
        rows = mixed @ M  # [H, m, d]
        norm_weight = omega.new_ones(1, r)
        if orthogonal and proposal is None and m >= r and not w.requires_grad and w.dtype.itemsize >= 4:
            norm_weight = 1 / omega[:, :r].square().sum(-1)
        else:
            rows = torch.cat([M.expand(len(rows), r, head_dim), rows], dim=1)
        shift = None if shift is None else shift.double().view(-1, head_dim)
        tensors = (rows, norm_weight, log_weight, shift)
        return Features(*(t if t is None else t.to(dtype).expand(H, *t.shape[1:]) for t in tensors))


def _geometry(M: Tensor | None, w: Tensor, head_dim: int) -> Tensor:
    """Return M as [H, r, d]."""
    if M is None or M.numel() == 1:
        eye = torch.eye(head_dim, dtype=torch.float64, device=w.device)[None]
        M = eye if M is None else eye * M.double()
    else:
        M = M.double().view(-1, *M.shape[-2:])
    if w.dim() not in (2, 3) or M.dim() != 3 or M.shape[1] != w.shape[-1] or M.shape[2] != head_dim:
        raise ValueError(
            f"w [m, r] or [h, m, r] of shape {tuple(w.shape)} and M [r, d] or [h, r, d] of shape "
            f"{tuple(M.shape[-2:])} do not fit each other and d = {head_dim}."
        )
    return M


def _mix(*numbers: int) -> int:
    """Return one 63-bit seed for several integers (splitmix64 over each in turn)."""
    mask, state = (1 << 64) - 1, 0
    for number in numbers:
        state = (state ^ number & mask) + 0x9E3779B97F4A7C15 & mask
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ state >> shift) * factor & mask
        state ^= state >> 31
    return state >> 1

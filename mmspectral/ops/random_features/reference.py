"""Naive float64 twins of attention over random features, of quadratic cost and written for reading.

Differentiable by autograd; they share no code with the fast path.
"""

import torch
from torch import Tensor


def feature_map(
    x: Tensor, w: Tensor, M: Tensor, scale: float, basis: Tensor | None = None, variance: Tensor | None = None
) -> Tensor:
    """Return phi(x) [N, m] of one head, with E[phi(q) . phi(k)] = exp(scale q^T M^T M k).

    Args:
        x: [N, d].
        w: omega [m, r], draws of N(0, I).
        M: [r, d].
        scale: Of the logits.
        basis: V [r, r] of a proposal N(0, V diag(sigma) V^T).
        variance: sigma [r].
    """
    m, r = w.shape
    w, z = w.double(), scale**0.5 * x.double() @ M.double().t()
    columns = []
    for j in range(m):
        omega, log_ratio = w[j], w.new_zeros((), dtype=torch.float64)
        if variance is not None:
            V, sigma = basis.double(), variance.double()
            Sigma = V @ torch.diag(sigma) @ V.t()
            omega = V @ (sigma.sqrt() * w[j])
            log_ratio = (torch.logdet(Sigma) - omega @ omega + omega @ torch.linalg.inv(Sigma) @ omega) / 2
        columns.append((z @ omega - z.square().sum(-1) / 2 + log_ratio / 2).exp() / m**0.5)
    return torch.stack(columns, dim=-1)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    M: Tensor,
    scale: float,
    shift: Tensor | None = None,
    basis: Tensor | None = None,
    variance: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return attention with the explicit kernel matrix in float64, [B, h, N, e].

    Args:
        q: [B, h, N, d].
        k: [B, H, L, d]; query head t sees key head t * H // h.
        v: [B, H, L, e].
        w: [h, m, r].
        M: [h, r, d].
        scale: Of the logits.
        shift: [h, d], subtracted from the keys.
        basis: [h, r, r].
        variance: [h, r].
        mask: [B, L], True for keys that may be seen.
        causal: Query i sees keys 0 .. i only.
    """
    images = []
    for b in range(q.shape[0]):
        heads = []
        for t in range(q.shape[1]):
            source = t * k.shape[1] // q.shape[1]
            keys = k[b, source].double() if shift is None else k[b, source].double() - shift[t].double()
            proposal = (None, None) if basis is None else (basis[t], variance[t])
            phi_q, phi_k = (feature_map(x, w[t], M[t], scale, *proposal) for x in (q[b, t], keys))
            kernel = phi_q @ phi_k.t()  # [N, L]
            if mask is not None:
                kernel = kernel * mask[b]
            if causal:
                kernel = kernel.tril()
            heads.append(kernel @ v[b, source].double() / kernel.sum(-1, keepdim=True))
        images.append(torch.stack(heads))
    return torch.stack(images)

"""Naive float64 twins of every op, written for reading, not for speed.

Each follows its formula entry by entry and shares no code with the fast path.
"""

import torch
from torch import Tensor


def identity_matrix(rows: int, columns: int, roles: list[float], num_heads: int, row_order: str, scope: str) -> Tensor:
    """Build C entry by entry.

    Args:
        rows: P * D.
        columns: E.
        roles: lambda of each of the P projections.
        num_heads: h.
        row_order: ``"[3][heads][d]"`` or ``"[heads][3][d]"``.
        scope: ``"full"`` or ``"head"``.

    Returns:
        C [rows, columns], float64.
    """
    C = torch.zeros(rows, columns, dtype=torch.float64)
    P, d = len(roles), rows // (len(roles) * num_heads)
    for p, scale in enumerate(roles):
        for head in range(num_heads):
            for i in range(d):
                row = (p * num_heads + head) * d + i if row_order == "[3][heads][d]" else (head * P + p) * d + i
                column = head * d + i if scope == "full" else i
                if column < columns:
                    C[row, column] = scale
    return C


def conditioned_linear(x: Tensor, weight: Tensor, bias: Tensor | None, C: Tensor) -> Tensor:
    """Return x (W + C)^T + b in float64; x [..., E], weight and C [P * D, E]."""
    y = x.double() @ (weight.double() + C).t()
    return y if bias is None else y + bias.double()


def norm_preserving_weight(weight: Tensor, C: Tensor, std: float) -> Tensor:
    """Return s (W + C) [D, E] of one projection in float64, s^2 = D E std^2 / (D E std^2 + |C|_F^2)."""
    learned = weight.numel() * std**2
    return (learned / (learned + C.square().sum())).sqrt() * (weight.double() + C)


def polar_correction(matrix: Tensor) -> Tensor:
    """Return sigma_max U V^T = sigma_max W (W^T W)^(-1/2) of one W [rows, columns] of full rank, in float64."""
    W = matrix.double()
    if W.shape[0] < W.shape[1]:
        return polar_correction(W.t()).t()
    squares, V = torch.linalg.eigh(W.t() @ W)
    return squares.max().sqrt() * W @ V @ torch.diag(squares.rsqrt()) @ V.t()


def cross_covariance_attention(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    """Return XCA in float64, one head at a time; q, k, v [B, h, d, N], temperature [h, 1, 1]."""
    q, k, v, temperature = q.double(), k.double(), v.double(), temperature.double()
    images = []
    for b in range(q.shape[0]):
        heads = []
        for h in range(q.shape[1]):
            q_hat = q[b, h] / q[b, h].square().sum(-1, keepdim=True).sqrt()
            k_hat = k[b, h] / k[b, h].square().sum(-1, keepdim=True).sqrt()
            logits = temperature[h] * (q_hat @ k_hat.t())  # [d, d]
            weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
            heads.append(weights @ v[b, h])
        images.append(torch.stack(heads))
    return torch.stack(images)

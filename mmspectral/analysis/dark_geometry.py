"""What attention over random features takes from data, per head: M, a proposal and a shift of the keys.

Shape legend as in :mod:`mmspectral.ops.random_features.features`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmspectral.ops.random_features.features import Features, Proposal, fold_features, sharp_proposal


@dataclass(frozen=True)
class Geometry:
    """All that random features of a layer need besides the draw.

    Args:
        M: [H, r, d].
        proposal: V [H, r, r] and sigma [H, r], or None for N(0, I).
        shift: c [H, d], or None.
    """

    M: Tensor
    proposal: Proposal | None = None
    shift: Tensor | None = None

    def features(self, w: Tensor, scale: float | None = None) -> Features:
        """Fold a draw w [m, r] of :func:`~mmspectral.ops.random_features.features.draw_projection`."""
        return fold_features(w, self.M, self.M.shape[-1], scale, self.shift, self.proposal, orthogonal=True)


class Moments(NamedTuple):
    """Means [H, d] and covariances [H, d, d] of queries and keys, in float64."""

    query_mean: Tensor
    query_covariance: Tensor
    key_mean: Tensor
    key_covariance: Tensor

    @property
    def shift(self) -> Tensor:
        """The shift that centres q + k - c, [H, d]."""
        return self.query_mean + self.key_mean

    @property
    def covariance(self) -> Tensor:
        """Lambda, the mean of both covariances, [H, d, d]."""
        return (self.query_covariance + self.key_covariance) / 2

    def proposal(self, M: Tensor, shift: Tensor | None, scale: float) -> Proposal:
        """Return the sharp proposal for M [H, r, d] and shift [H, d], queries and keys taken as independent."""
        offset = self.shift if shift is None else self.shift - shift
        second_moment = 2 * self.covariance + offset[:, :, None] * offset[:, None]
        M = M.double()
        return sharp_proposal(scale * M @ second_moment @ M.mT)


def query_key_moments(q: Tensor, k: Tensor, shared: bool = False) -> Moments:
    """Measure the moments of q [B, h, N, d] and k [B, h, L, d], of each head or (``shared``) of all together."""
    return Moments(*_moments(q, shared), *_moments(k, shared))


def effective_rank(covariance: Tensor) -> Tensor:
    """Return exp(entropy) of the eigenvalues of a covariance [..., d, d] as shares of its trace."""
    share = torch.linalg.eigvalsh(covariance).clamp(min=0)
    share = share / share.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def covariance_family(
    covariance: Tensor, scales: Sequence[float], strengths: Sequence[float], rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and M = s (I + a Lambda)^(-1/2) [H, r, d] for each s and a; a = 0 is s I.

    Args:
        covariance: Lambda [H, d, d], scale of the logits included.
        scales: s.
        strengths: a.
        rank: r. Below d, the r leading eigendirections are kept, as rows of M.
    """
    lambda_, V = torch.linalg.eigh(covariance)
    lambda_, V = lambda_[:, -rank:], V[..., -rank:]  # ascending
    for a in strengths:
        M = (1 + a * lambda_).rsqrt()[..., None] * V.mT
        M = M if rank < V.shape[-2] else V @ M
        for s in scales:
            yield f"s = {s:g}, a = {a:g}", s * M


def _moments(x: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
    x = x.double().transpose(0, 1).flatten(0 if shared else 1, 2)  # [h, B n, d] or [h B n, d]
    x = x.view(-1, *x.shape[-2:])
    mean = x.mean(1)
    centred = x - mean[:, None]
    return mean, centred.mT @ centred / x.shape[1]

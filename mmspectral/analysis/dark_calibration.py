"""Choose M, the proposal and the shift of DARK attention from real queries, keys and values of one layer.

What is measured is the error of the attention output against exact softmax, at
the number of features that will be used: the more there are, the closer to
softmax the best kernel is. Choices are made per head.

Shape legend: B sequences, h heads, N queries, L keys, d and e channels of keys
and values, m features, r rank of M; H geometries, h or, if heads share, 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mmspectral.analysis.approximation import approximation_error
from mmspectral.arguments import FLAG, check, checked, listed, optional, real, whole
from mmspectral.ops.random_features import (
    Features,
    Proposal,
    draw_projection,
    fold_features,
    linear_attention,
    sharp_proposal,
    softmax_attention,
)

SCALES = (0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4)  # s
STRENGTHS = (0.0, 0.3, 1.0, 3.0, 10.0)  # a
QUERIES_PER_STEP = 512  # of fitting, in whole sequences and at least one: fewer make its gradient too noisy
DRAWS_OF_NO_LAYER = 1 << 40  # where layers have their index, so that no choice has seen the draw it is used with


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
        """Fold a draw w [m, r] of :func:`~mmspectral.ops.random_features.draw_projection`."""
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
    moments = []
    for x in (q, k):
        x = x.double().transpose(0, 1).flatten(0 if shared else 1, 2)  # [h, B n, d] or [h B n, d]
        x = x.view(-1, *x.shape[-2:])
        mean = x.mean(1)
        centred = x - mean[:, None]
        moments += [mean, centred.mT @ centred / x.shape[1]]
    return Moments(*moments)


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


@dataclass(frozen=True)
class Fit:
    """How M is fitted to the output error: by Adam, with other sequences and draws in each step.

    Args:
        steps: Number of steps.
        lr: First learning rate of a cosine decay, relative to the size of M and to the spread of queries and keys.
        shift: Whether the shift, if there is one, is fitted too.
    """

    steps: int = 300
    lr: float = 0.02
    shift: bool = True

    def __post_init__(self):
        for name, kind in dict(steps=whole(0), lr=real(above=0), shift=FLAG).items():
            check(f"Fit: {name}", getattr(self, name), kind)


@dataclass(frozen=True, kw_only=True)
class CalibratedGeometry(Geometry):
    """A geometry and what it is worth on tokens that fitting has not seen, though the choice has.

    Args:
        choice: What was best, s and a or "fitted" [H].
        effective_rank: exp(entropy) of the eigenvalues of Lambda, 1 to d [H].
        condition: Largest over smallest eigenvalue of Lambda [H].
        error_before: Relative error of the output with M = I and nothing else, which is Performer [h].
        error_after: The same with this geometry [h].
    """

    choice: tuple[str, ...]
    effective_rank: Tensor
    condition: Tensor
    error_before: Tensor
    error_after: Tensor


@checked(
    num_features=whole(1),
    sharp=FLAG,
    shift=FLAG,
    rank=optional(whole(1)),
    shared=FLAG,
    scales=listed(real(above=0), least=1),
    strengths=listed(real(0), least=1),
    scale=optional(real(above=0)),
    draws=whole(1),
    seed=whole(),
)
@torch.no_grad()
def calibrate_geometry(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    num_features: int,
    *,
    sharp: bool = True,
    shift: bool = True,
    fit: Fit | None = Fit(),
    rank: int | None = None,
    shared: bool = False,
    scales: Sequence[float] = SCALES,
    strengths: Sequence[float] = STRENGTHS,
    scale: float | None = None,
    draws: int = 2,
    seed: int = 0,
) -> CalibratedGeometry:
    """Choose the geometry of one layer by its measured error against exact softmax attention.

    Candidates are s (I + a Lambda)^(-1/2) for all s and a, Lambda being the mean
    covariance of queries and keys, and a fitted M that starts from the best of
    them. Fitting sees some sequences (of a single one: every other query),
    measurements are on the others, with other draws. A step of fitting is one
    of the attention over one sequence, or several short ones.

    Args:
        q: [B, h, N, d].
        k: [B, h, L, d].
        v: [B, h, L, e]; None for Gaussian probes, which weigh all attention weights alike.
        num_features: m.
        sharp: Whether to draw from the sharp proposal.
        shift: Whether to shift the keys, by mean(q) + mean(k) unless fitted.
        fit: None for the family alone.
        rank: r, default d.
        shared: Whether all heads share one geometry.
        scales: s.
        strengths: a.
        scale: Of the logits, default d^(-1/2).
        draws: Number of draws to measure each candidate with.
        seed: Of draws and probes.

    Raises:
        ValueError: Something is not finite.
    """
    q, k = q.float(), k.float()
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(seed)).to(k.device) if v is None else v.float()
    if not all(t.isfinite().all() for t in (q, k, v)):
        raise ValueError("the queries, keys or values to calibrate with are not finite; look for where they come from.")
    d = q.shape[-1]
    scale = d**-0.5 if scale is None else scale
    seen, unseen = _split(Sample(q, k, v, softmax_attention(q, k, v, scale=scale)))
    layer = _Layer(query_key_moments(q, k, shared), num_features, scale, sharp, seed)
    lambda_ = layer.moments.covariance
    c = layer.moments.shift.float() if shift else None

    names, candidates = zip(*covariance_family(scale * lambda_, scales, strengths, rank or d), strict=True)
    candidates = torch.stack(candidates).float()  # [candidates, H, r, d]
    errors = torch.stack([layer.mean_error(unseen, layer.geometry(M, c), range(draws)) for M in candidates])
    best = errors.argmin(0)  # [H]
    choice = [names[i] for i in best]
    geometry = layer.geometry(candidates[best, torch.arange(len(best), device=best.device)], c)
    fresh = range(draws, 2 * draws)  # the least of many measurements is too low
    if fit is not None:
        fitted = layer.fit(seen, geometry, fit, first_draw=2 * draws)
        better = layer.mean_error(unseen, fitted, fresh) < layer.mean_error(unseen, geometry, fresh)
        choice = ["fitted" if b else name for b, name in zip(better, choice, strict=True)]
        c = c if c is None else torch.where(better[:, None], fitted.shift, c)
        geometry = layer.geometry(torch.where(better[:, None, None], fitted.M, geometry.M), c)
    eigenvalues = torch.linalg.eigvalsh(lambda_)
    return CalibratedGeometry(
        geometry.M,
        geometry.proposal,
        geometry.shift,
        choice=tuple(choice),
        effective_rank=effective_rank(lambda_),
        condition=eigenvalues[:, -1] / eigenvalues[:, 0].clamp(min=0),  # inf where too few tokens span the space
        error_before=layer.errors(unseen, Geometry(torch.eye(d, device=q.device)[None]), fresh),
        error_after=layer.errors(unseen, geometry, fresh),
    )


class Sample(NamedTuple):
    """Queries, keys and values, and the exact attention [B, h, N, e] of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    exact: Tensor


@dataclass(frozen=True)
class _Layer:
    """What all candidates have in common."""

    moments: Moments
    num_features: int
    scale: float
    sharp: bool
    seed: int

    def geometry(self, M: Tensor, shift: Tensor | None) -> Geometry:
        return Geometry(M, self.moments.proposal(M, shift, self.scale) if self.sharp else None, shift)

    def attention(self, sample: Sample, geometry: Geometry, draw: int) -> Tensor:
        w = draw_projection(self.num_features, geometry.M.shape[1], self.seed, DRAWS_OF_NO_LAYER, draw)
        return linear_attention(*sample[:3], geometry.features(w.to(geometry.M.device), self.scale))

    def errors(self, sample: Sample, geometry: Geometry, draws: Iterable[int]) -> Tensor:
        return approximation_error(partial(self.attention, sample, geometry), sample.exact, draws).softmax

    def mean_error(self, sample: Sample, geometry: Geometry, draws: Iterable[int]) -> Tensor:
        """Return the mean over the heads that share a geometry, [H]."""
        return self.errors(sample, geometry, draws).view(len(geometry.M), -1).mean(-1)

    @torch.enable_grad()
    def fit(self, sample: Sample, start: Geometry, settings: Fit, first_draw: int) -> Geometry:
        """Return M and shift after Adam on the squared relative error, its parameters being in units of the start."""
        unit = start.M.square().sum((1, 2), keepdim=True).div(start.M.shape[1]).sqrt()
        M = (start.M / unit).requires_grad_()
        spread = self.moments.covariance.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True).sqrt().float()
        move = torch.zeros_like(M[:, 0]).requires_grad_(settings.shift and start.shift is not None)  # [H, d]

        def current() -> tuple[Tensor, Tensor | None]:
            return unit * M, None if start.shift is None else start.shift + spread * move

        optimizer = torch.optim.Adam([t for t in (M, move) if t.requires_grad], settings.lr, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
        batch = min(len(sample.q), max(1, QUERIES_PER_STEP // sample.q.shape[2]))
        for step in range(settings.steps):
            with torch.no_grad():  # the proposal is the best for M and shift as they are
                proposal = self.geometry(*current()).proposal
            M_now, shift = current()
            chosen = (torch.arange(batch) + step * batch) % len(sample.q)
            part = Sample(*(t[chosen] for t in sample))
            out = self.attention(part, Geometry(M_now, proposal, shift), first_draw + step)
            errors = (out - part.exact).square().sum((0, 2, 3)) / part.exact.square().sum((0, 2, 3))
            optimizer.zero_grad()
            errors.sum().backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            return self.geometry(*current())


def _split(sample: Sample) -> tuple[Sample, Sample]:
    """Return what to fit with and what to measure with: sequences, or of a single one the queries by turns."""
    B = len(sample.q)
    if B > 1:
        fitted = B - -(-B // 4)
        return Sample(*(t[:fitted] for t in sample)), Sample(*(t[fitted:] for t in sample))
    even, odd = (sample._replace(q=sample.q[:, :, i::2], exact=sample.exact[:, :, i::2]) for i in (0, 1))
    return even, odd

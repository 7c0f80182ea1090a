r"""Parameter Jacobian of dot-product attention and its condition number (arXiv 2603.07162, Theorems 3.3 and 3.4).

One head without biases, A(X) = S V with S = softmax(tau Q K^T) over the columns,
Q = X Wq, K = X Wk, V = X Wv. With column-major vec and Lambda = dvec(S) / dvec(logits):

    dvec(A) / dvec(Wv) = I (x) (S X)
    dvec(A) / dvec(Wq) = tau (V^T (x) I) Lambda (K (x) X)
    dvec(A) / dvec(Wk) = tau (V^T (x) I) Lambda (X (x) Q) P,  P vec(Wk) = vec(Wk^T)

Lambda couples only entries of the same row n of S, by diag(s_n) - s_n s_n^T. So
the products above are formed row by row, with nothing of size N^2 x N^2.

Shape legend: N tokens, D input features, d rows per head of q and k, e of v.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EffectiveCondition:
    """Condition of a matrix on the complement of its null space.

    Args:
        kappa: Largest over smallest non-zero singular value; infinite for a zero matrix.
        rank: Number of singular values above the threshold.
        full_rank: The smaller side of the matrix.
    """

    kappa: float
    rank: int
    full_rank: int

    @property
    def deficient(self) -> bool:
        """Whether the matrix has a singular value that counts as zero: sigma_max / sigma_min is infinite then."""
        return self.rank < self.full_rank


@dataclass(frozen=True)
class JacobianBound:
    """The factors of Theorem 3.4, each with its rank: X, Lambda, Wq, Wk, Wv and S."""

    tokens: EffectiveCondition
    softmax_derivative: EffectiveCondition
    query: EffectiveCondition
    key: EffectiveCondition
    value: EffectiveCondition
    softmax: EffectiveCondition

    @property
    def effective(self) -> float:
        """The right side with each kappa taken over the non-zero singular values."""
        X = self.tokens.kappa
        projections = self.value.kappa * (self.query.kappa + self.key.kappa)
        return X**3 * self.softmax_derivative.kappa * projections + X * self.softmax.kappa

    @property
    def deficient_factors(self) -> tuple[str, ...]:
        """The factors whose condition number proper is infinite, which makes the right side infinite."""
        names = ("tokens", "softmax_derivative", "query", "key", "value", "softmax")
        return tuple(name for name in names if getattr(self, name).deficient)


def attention(tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    """Return A(X) = softmax(tau X Wq Wk^T X^T) X Wv [N, e]; tau is ``scale``, 1 in the theorem."""
    return _softmax(tokens, query, key, scale) @ (tokens @ value)


def attention_jacobian(
    tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives of A(X) with respect to Wq, Wk and Wv by their closed forms (Theorem 3.3).

    Returns:
        Matrices [N e, D d], [N e, D d] and [N e, D e]; rows and columns follow
        the column-major vec of A and of the weight. Their concatenation along
        the columns is the parameter Jacobian J.
    """
    S = _softmax(tokens, query, key, scale)
    Q, K, V = tokens @ query, tokens @ key, tokens @ value
    # Columns a, row index b of a D x d weight: entry (n, j; a, b) of each derivative.
    by_query = scale * torch.einsum("na,njb->njab", tokens, _through_softmax(S, V, K))
    by_key = scale * torch.einsum("nja,nb->njab", _through_softmax(S, V, tokens), Q)
    identity = torch.eye(V.shape[1], dtype=V.dtype, device=V.device)
    by_value = torch.einsum("na,jb->njab", S @ tokens, identity)
    return _matricize(by_query), _matricize(by_key), _matricize(by_value)


def effective_condition(matrix: Tensor, rtol: float | None = None) -> EffectiveCondition:
    """Return the condition of a matrix [rows, columns] over its non-zero singular values.

    Args:
        matrix: Any real matrix; measured in float64.
        rtol: Singular values up to ``rtol`` times the largest count as zero.
            Default: max(rows, columns) times the float64 epsilon, numpy's rule
            for the rank.
    """
    return _effective(torch.linalg.svdvals(matrix.double()), max(matrix.shape), rtol)


def jacobian_bound(
    tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0, rtol: float | None = None
) -> JacobianBound:
    """Return the factors of the right side of Theorem 3.4.

    The theorem reads kappa(J) <= kappa(X)^3 kappa(Lambda) kappa(Wv) (kappa(Wq) + kappa(Wk)) + kappa(X) kappa(S).
    What the number is worth:

    - Lambda is always singular: adding a constant to a row of logits leaves S as
      it is, so its rank is at most N (N - 1) of N^2. With kappa(Lambda) =
      sigma_max / sigma_min the right side is infinite and says nothing.
    - With the non-zero singular values in its place the right side is finite
      and no longer a bound. It does not change when Wv is multiplied by a
      number, while the derivatives by Wq and Wk are and the one by Wv is not:
      with N <= e tokens kappa(J) then grows without limit. Where kappa(J) stays
      below it, it may be close (1.5 to 2 times for Gaussian weights of standard
      deviation 0.02, where kappa(X) kappa(S) makes up both sides) or too large
      by many orders of magnitude (nearly one-hot attention, through kappa(Lambda);
      ill-conditioned X, through kappa(X)^3).
    - X is rank-deficient when all tokens are layer-normalised without an affine
      part and N >= D, since each then sums to zero. For N > D the Jacobian is
      rank-deficient too (Wq G and Wk G^-T give the same function), so its kappa
      is also one over the non-zero singular values.
    """
    S = _softmax(tokens.double(), query.double(), key.double(), scale)
    blocks = torch.diag_embed(S) - S.unsqueeze(-1) * S.unsqueeze(-2)  # [N, N, N], symmetric and semi-definite
    Lambda = torch.linalg.eigvalsh(blocks).abs().flatten().sort(descending=True).values
    return JacobianBound(
        tokens=effective_condition(tokens, rtol),
        softmax_derivative=_effective(Lambda, len(Lambda), rtol),
        query=effective_condition(query, rtol),
        key=effective_condition(key, rtol),
        value=effective_condition(value, rtol),
        softmax=effective_condition(S, rtol),
    )


def _softmax(tokens: Tensor, query: Tensor, key: Tensor, scale: float) -> Tensor:
    return (scale * (tokens @ query) @ (tokens @ key).mT).softmax(dim=-1)


def _through_softmax(S: Tensor, V: Tensor, Y: Tensor) -> Tensor:
    """Return V^T (diag(s_n) - s_n s_n^T) Y for each row n: [N, e, columns of Y].

    As the covariance of V and Y under the weights s_n: no difference of nearly
    equal products where attention is almost one-hot.
    """
    V_centred = V - (S @ V).unsqueeze(1)  # [N, N, e]: row n, column m
    Y_centred = Y - (S @ Y).unsqueeze(1)
    return torch.einsum("nm,nme,nmc->nec", S, V_centred, Y_centred)


def _matricize(derivative: Tensor) -> Tensor:
    """Turn [n, j, a, b], the derivative of A[n, j] by W[a, b], into the matrix between column-major vecs."""
    N, e, D, d = derivative.shape
    return derivative.permute(1, 0, 3, 2).reshape(e * N, d * D)


def _effective(sigma: Tensor, size: int, rtol: float | None) -> EffectiveCondition:
    rtol = size * torch.finfo(sigma.dtype).eps if rtol is None else rtol
    nonzero = sigma[sigma > rtol * sigma[0]]
    kappa = (nonzero[0] / nonzero[-1]).item() if len(nonzero) else float("inf")
    return EffectiveCondition(kappa, len(nonzero), len(sigma))

"""How the rows of a projection weight are shared among q, k, v and the heads; no other file compares a row order.

Shape legend: P projections fused in one weight, h heads, d rows per head,
D = h * d rows per projection, E input features; weight [P * D, E].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspectral.arguments import check, listed, one_of, whole

SCOPES = ("full", "head")
ROW_ORDERS = ("[3][heads][d]", "[heads][3][d]")


@dataclass(frozen=True)
class ProjectionLayout:
    """Row layout of one (fused or separate) attention projection.

    Args:
        roles: What the weight projects to, in row order: ``("q", "k", "v")``
            for a fused weight, ``("k",)`` for a separate one.
        num_heads: Number of heads h.
        row_order: ``"[3][heads][d]"`` (ViT, Swin, XCiT: all of q, then all of
            k, then all of v) or ``"[heads][3][d]"`` (NeoX-style BERT: q, k, v
            of head 0, then of head 1).

    Raises:
        ValueError: Unknown row order, a role given twice, or no head.
    """

    roles: tuple[str, ...]
    num_heads: int
    row_order: str = ROW_ORDERS[0]

    def __post_init__(self):
        roles = tuple(check("roles", self.roles, listed(one_of("q", "k", "v"), least=1)))
        object.__setattr__(self, "roles", roles)
        object.__setattr__(self, "num_heads", check("num_heads", self.num_heads, whole(1)))
        check("row_order", self.row_order, one_of(*ROW_ORDERS))
        if len(set(roles)) != len(roles):
            raise ValueError(f"roles must name each projection once, got {roles}.")

    @property
    def heads_first(self) -> bool:
        """Whether q, k and v alternate from head to head, so that the rows of a projection do not lie together."""
        return self.row_order == ROW_ORDERS[1]

    def rows_per_head(self, out_features: int) -> int:
        """Return d, the rows of one head in one projection.

        Raises:
            ValueError: ``out_features`` is not a multiple of P * h.
        """
        blocks = len(self.roles) * self.num_heads
        if out_features % blocks:
            raise ValueError(
                f"a weight of {out_features} rows cannot hold {len(self.roles)} projections "
                f"({', '.join(self.roles)}) of {self.num_heads} heads each: "
                f"{out_features} is not a multiple of {blocks}."
            )
        return out_features // blocks

    def heads(self, rows: Tensor, dim: int = 0) -> Tensor:
        """View a dimension of P * D rows as [P, h, d], in place of ``dim``."""
        dim %= rows.dim()
        P, h, d = len(self.roles), self.num_heads, self.rows_per_head(rows.shape[dim])
        if self.heads_first:
            return rows.unflatten(dim, (h, P, d)).transpose(dim, dim + 1)
        return rows.unflatten(dim, (P, h, d))

    def join_heads(self, heads: Tensor, dim: int = 0) -> Tensor:
        """Undo :meth:`heads`: dimensions [P, h, d] from ``dim`` on become P * D rows."""
        dim %= heads.dim()
        return (heads.transpose(dim, dim + 1) if self.heads_first else heads).flatten(dim, dim + 2)

    def split(self, weight: Tensor, scope: str = "full") -> Tensor:
        """Return the matrices of a weight [P * D, E] whose condition number the scope is about.

        Returns:
            [P, D, E] for scope ``full``, [P, h, d, E] for scope ``head``.
        """
        check_scope(scope)
        require_whole(weight)
        blocks = self.heads(weight)
        return blocks if scope == "head" else blocks.flatten(1, 2)

    def merge(self, blocks: Tensor) -> Tensor:
        """Put what :meth:`split` took apart, of either scope, back into one weight [P * D, E]."""
        return self.join_heads(blocks.reshape(len(self.roles), self.num_heads, -1, blocks.shape[-1]))

    def row_factors(self, factors: Tensor, rows: int) -> Tensor:
        """Spread one factor per projection [P] over P * D rows."""
        P, h, d = len(self.roles), self.num_heads, self.rows_per_head(rows)
        return self.join_heads(factors.view(P, 1, 1).expand(P, h, d))

    def scale_rows(self, matrix: Tensor, factors: Sequence[float]) -> Tensor:
        """Multiply the rows of each projection in [P * D, ...] by its factor, out of place."""
        if len(set(factors)) == 1:
            return matrix * factors[0]
        scaled = [block * factor for block, factor in zip(self.heads(matrix).unbind(0), factors, strict=True)]
        return self.join_heads(torch.stack(scaled))

    def diagonal(self, weight: Tensor, scope: str) -> Tensor:
        """View the entries of a weight [P * D, E] on which the identity has its ones.

        Returns:
            A view with the projections first: [P, n], or [P, h, n] for scope
            ``head`` and where heads come first.

        Raises:
            ValueError: Unknown scope; rows that do not fit the layout; or scope
                ``full`` on interleaved rows of a projection that is not square.
        """
        check_scope(scope)
        E, P, h = weight.shape[1], len(self.roles), self.num_heads
        blocks = self.heads(weight)  # [P, h, d, E]
        d = blocks.shape[2]
        if scope == "head":
            return blocks.diagonal(dim1=2, dim2=3)  # [P, h, min(d, E)]
        if not self.heads_first:
            return weight.unflatten(0, (P, h * d)).diagonal(dim1=1, dim2=2)  # [P, min(D, E)]
        if h * d != E:
            raise ValueError(f"scope 'full' on rows {self.row_order} needs a square projection, got {h * d} x {E}.")
        blocks = blocks.unflatten(3, (h, d)).diagonal(dim1=1, dim2=3)  # [P, d, d, h]
        return blocks.diagonal(dim1=1, dim2=2)  # [P, h, d]

    def as_dict(self) -> dict:
        """Return the layout as plain data, for checkpoints."""
        return dict(roles=list(self.roles), num_heads=self.num_heads, row_order=self.row_order)


def check_scope(scope: str) -> None:
    """Raise ValueError for an unknown scope."""
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}.")


def require_whole(weight: Tensor) -> None:
    """Raise ValueError for a weight of which this rank has a part: a DTensor, or flat (FullyShardedDataParallel)."""
    if hasattr(weight, "full_tensor") or weight.dim() != 2:
        raise ValueError(
            f"a weight {list(weight.shape)} is kept in parts by several ranks, and this needs all of it. Do it before "
            "the model is sharded; or gather the weights, by torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), and load them into a model "
            "that is not. To train a correction with an interval, shard by fully_shard, not by "
            "FullyShardedDataParallel (mmengine's FSDPStrategy), or take interval=1."
        )

"""How the rows of a projection weight are shared among q, k, v and the heads.

Shape legend: P projections fused in one weight, h heads, d rows per head,
D = h * d rows per projection, E input features; weight [P * D, E].
"""

from dataclasses import dataclass

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
    row_order: str = "[3][heads][d]"

    def __post_init__(self):
        object.__setattr__(self, "roles", tuple(self.roles))
        if self.row_order not in ROW_ORDERS:
            raise ValueError(f"row_order must be one of {ROW_ORDERS}, got {self.row_order!r}.")
        if not self.roles or len(set(self.roles)) != len(self.roles):
            raise ValueError(f"roles must name each projection once, got {self.roles}.")
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads}.")

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

    def as_dict(self) -> dict:
        """Return the layout as plain data, for checkpoints."""
        return dict(roles=list(self.roles), num_heads=self.num_heads, row_order=self.row_order)

"""torch's multi-head attention with conditioned q, k and v: DETR, Mask2Former and DINO decoders, ``vit_b_16``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mmspectral.layers.corrections import Correction
from mmspectral.layers.projection import ShowsEffective, shown, write_note
from mmspectral.ops import ProjectionLayout

ROLES = ("q", "k", "v")
SEPARATE_WEIGHTS = tuple(f"{role}_proj_weight" for role in ROLES)
WEIGHTS = ("in_proj_weight", *SEPARATE_WEIGHTS)
PARAMETERS = (*WEIGHTS, "in_proj_bias", "bias_k", "bias_v")


class ConditionedMultiheadAttention(ShowsEffective, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose projections are W + C; its parameters are W and the biases.

    Covers the packed ``in_proj_weight`` [3 * E, E] and, where ``kdim`` or ``vdim``
    differ, the separate ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``.
    Names and shapes in ``state_dict`` are those of ``nn.MultiheadAttention``.

    torch's fused inference kernels are not used: ``nn.TransformerEncoderLayer``
    hands ``in_proj_weight`` to them and would leave C out. Fold the model to have
    them back.
    """

    in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight = map(shown, WEIGHTS)

    def __init__(self, stock: nn.MultiheadAttention, conditioning: Correction) -> None:
        super().__init__(**_arguments(stock))
        _share(self, stock)
        # TransformerEncoderLayer and TransformerEncoder ask for this before they read in_proj_weight themselves.
        self._qkv_same_embed_dim = False
        self.conditioning = conditioning
        self.layout = ProjectionLayout(ROLES, stock.num_heads)
        self.register_state_dict_post_hook(write_note)
        self.train(stock.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as ``nn.MultiheadAttention`` does; tokens are [N, B, E], [B, N, E] (``batch_first``) or [N, E].

        Raises:
            ValueError: A nested tensor, which only torch's fused kernels take.
        """
        if query.is_nested:
            raise ValueError(
                "a conditioned nn.MultiheadAttention takes no nested tensors. Build nn.TransformerEncoder with "
                "enable_nested_tensor=False, or fold the model."
            )
        transpose = self.batch_first and query.dim() == 3
        if transpose:
            # The same tensor stays the same object, so that torch projects it once.
            turned = {id(tokens): tokens.transpose(0, 1) for tokens in (query, key, value)}
            query, key, value = turned[id(query)], turned[id(key)], turned[id(value)]
        weights = self.effective_weights()
        packed = weights.pop("in_proj_weight", None)
        attended, attention = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            packed,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=packed is None,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            **weights,
        )
        return (attended.transpose(0, 1) if transpose else attended), attention

    def folded(self) -> nn.MultiheadAttention:
        """Return a plain ``nn.MultiheadAttention`` with weights W + C and the same biases."""
        stock = nn.MultiheadAttention(**_arguments(self)).train(self.training)
        _share(stock, self)
        for name, weight in self.effective_weights().items():
            trained = self.own(name).requires_grad
            setattr(stock, name, nn.Parameter(weight.detach(), requires_grad=trained))
        return stock

    def extra_repr(self) -> str:
        return f"conditioning={self.conditioning}, layout={self.layout.as_dict()}"

    def correction_matrices(self) -> dict[str, Tensor]:
        """Return the C in use by name of the parameter that it is added to."""
        return {name: self.conditioning.matrix(self.own(name), layout) for name, layout in weight_layouts(self).items()}

    def effective_weights(self) -> dict[str, Tensor]:
        """Return W + C by name of the parameter W."""
        return {name: self.effective(name) for name in weight_layouts(self)}

    def _effective(self, name: str, dtype: torch.dtype | None) -> Tensor:
        layout, weight = weight_layouts(self)[name], self.own(name)
        if isinstance(weight, fx.Proxy):
            return self.conditioning.traced(weight, self._parameters[name], layout)
        return self.conditioning.corrected(weight, layout, dtype)


def weight_layouts(attention: nn.MultiheadAttention) -> dict[str, ProjectionLayout]:
    """Return the row layout of each projection weight of a layer by parameter name."""
    if attention._parameters.get("in_proj_weight") is not None:
        return {"in_proj_weight": ProjectionLayout(ROLES, attention.num_heads)}
    return {
        name: ProjectionLayout((role,), attention.num_heads) for role, name in zip(ROLES, SEPARATE_WEIGHTS, strict=True)
    }


def _arguments(attention: nn.MultiheadAttention) -> dict:
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    return {name: getattr(attention, name) for name in names} | dict(device="meta")


def _share(target: nn.MultiheadAttention, source: nn.MultiheadAttention) -> None:
    for name in PARAMETERS:
        parameter = source._parameters.get(name)
        if name in ("bias_k", "bias_v") and parameter is None:
            continue  # torch keeps these as a plain None, not as an empty parameter
        setattr(target, name, parameter)
    target.out_proj = source.out_proj

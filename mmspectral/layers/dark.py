"""Attention of linear cost for any torch model, in the place of timm's ``Attention``.

Shape legend: B batch, h heads, H key heads, N tokens, L tokens of the context, D channels, d = D / h.
"""

from torch import Tensor, nn

from mmspectral.layers.kernels import ConstantKernel, RandomFeatureKernel, build_kernel
from mmspectral.ops.random_features import FeatureState, attend, linear_attention, summarise_keys


class DarkAttention(nn.Module):
    """Multi-head attention over random features (DARK, arXiv 2603.04127).

    Parameters are those of timm's ``Attention``, ``qkv`` (rows [3][h][d]) and
    ``proj``, and of ``kernel``; with a context or fewer key heads ``q`` and ``kv``
    (rows [2][H][d]) stand for ``qkv``. In the softmax layers' place::

        for i, block in enumerate(vit.blocks):
            block.attn = DarkAttention(384, num_heads=6, qkv_bias=True, layer=i)
        vit.load_state_dict(weights, strict=False)  # M, the draws w and their counter stay new

    Args:
        dim: Channels D of queries and output.
        num_heads: h.
        qkv_bias: Whether the projections to q, k and v have a bias.
        kernel: A dict for :func:`mmspectral.layers.build_kernel`; None is exact
            softmax. It has one M for each key head.
        num_kv_heads: H, if fewer heads have keys and values than queries.
        context_dim: Channels of the tokens attended to in cross-attention; None is
            self-attention.
        proj_bias: Whether the projection of the output has a bias.
        proj_drop: Dropout on the output. There is no dropout of attention: no attention matrix is made.
        layer: Index of the layer in its model, which its draws depend on.

    Raises:
        ValueError: Numbers of heads that do not divide, or as :func:`mmspectral.layers.build_kernel`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        *,
        kernel: dict | None = dict(type="dark"),
        num_kv_heads: int | None = None,
        context_dim: int | None = None,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        H = num_heads if num_kv_heads is None else num_kv_heads
        if dim % num_heads or num_heads % H:
            raise ValueError(f"dim {dim} must be a multiple of num_heads {num_heads}, and that of num_kv_heads {H}.")
        self.num_heads, self.num_kv_heads, self.head_dim, self.context_dim = num_heads, H, dim // num_heads, context_dim
        self.fused = num_heads == H and context_dim is None
        if self.fused:
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        else:
            self.q = nn.Linear(dim, dim, bias=qkv_bias)
            self.kv = nn.Linear(context_dim or dim, 2 * H * self.head_dim, bias=qkv_bias)
        self.kernel = build_kernel(kernel, H, self.head_dim, layer)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, context: Tensor | None = None
    ) -> Tensor:
        """Map tokens [B, N, D] to [B, N, D].

        Args:
            x: Tokens.
            attn_mask: [B, N] or, of a context, [B, L], bool, True for tokens that may be seen.
            is_causal: Token i sees tokens 0 .. i only.
            context: [B, L, context_dim], in cross-attention.

        Raises:
            ValueError: A context where there is none, or none where there is one.
        """
        q, k, v = self._project(x, self._attended(x, context))
        return self._output(self.kernel(q, k, v, attn_mask, is_causal))

    def step(
        self,
        x: Tensor,
        state: FeatureState | None = None,
        attn_mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, FeatureState]:
        """Attend to a state that holds all earlier keys in constant memory; for decoding.

        In self-attention this is causal attention, some tokens at a time: a prompt
        whole or in pieces, then token by token. In cross-attention ``context`` joins
        the state; without it x attends to what was there before. Gradients reach
        ``x`` and what ``state`` was computed from; the state returned has none.

        Args:
            x: [B, N, D].
            state: Of the step before.
            attn_mask: As in :meth:`forward`, of what joins the state.
            context: [B, L, context_dim], in cross-attention.

        Returns:
            The output [B, N, D] and the state.

        Raises:
            TypeError: The kernel cannot be summarised.
            ValueError: As in :meth:`forward`.
        """
        if not isinstance(self.kernel, RandomFeatureKernel) or isinstance(self.kernel, ConstantKernel):
            raise TypeError(
                f"a {type(self.kernel).__name__} keeps no state of constant size that fits the next token; "
                "call the layer with is_causal=True on the whole sequence."
            )
        carried = self.context_dim is not None and context is None and state is not None
        q, k, v = self._project(x, None if carried else self._attended(x, context))
        features = self.kernel.features()
        if carried:
            return self._output(attend(q, features, state)), state
        out = linear_attention(q, k, v, features, attn_mask, self.context_dim is None, state)
        return self._output(out), summarise_keys(k, v, features, attn_mask, state)

    def attention_logits(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return logits whose softmax the attention is, [B, h, N, L], for arguments of :meth:`forward`."""
        q, k, _ = self._project(x, self._attended(x, context))
        return self.kernel.logits(q, k)

    def _attended(self, x: Tensor, context: Tensor | None) -> Tensor:
        if (context is None) != (self.context_dim is None):
            needed = "no context" if self.context_dim is None else f"a context [B, L, {self.context_dim}]"
            raise ValueError(f"this layer takes {needed}, as context_dim={self.context_dim} says.")
        return x if context is None else context

    def _project(self, x: Tensor, attended: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return q [B, h, N, d], and k and v [B, H, L, d] of the tokens attended to, if any."""
        if self.fused:
            return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if attended is None:
            return q, None, None
        kv = self.kv(attended).unflatten(-1, (2, self.num_kv_heads, -1))
        return q, *kv.permute(2, 0, 3, 1, 4).unbind(0)

    def _output(self, x: Tensor) -> Tensor:
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))

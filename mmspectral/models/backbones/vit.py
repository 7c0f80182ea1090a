"""ViT with spectral conditioning, for classification and for dense features."""

import math
from collections.abc import Sequence

from mmengine.logging import print_log
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer, VisionTransformer
from torch import nn

from mmspectral.checkpoints import GRID_KEY, find_grid, fit_pos_embed
from mmspectral.layers import Conditioning, build_conditioning
from mmspectral.models.attention.adopt import adopt, condition_qkv
from mmspectral.models.attention.dot_product import SpectralMultiheadAttention
from mmspectral.models.sites import (
    ConditionedBackbone,
    Recomputed,
    check_frozen_stages,
    freeze,
    index_in,
    resolve_indices,
)
from mmspectral.registry import MODELS

TOKENS = ("cls_token", "dist_token")


@MODELS.register_module()
class SpectralViT(ConditionedBackbone, VisionTransformer):
    """mmpretrain's VisionTransformer with conditioned q, k and v projections.

    Parameter names are those of mmpretrain's VisionTransformer, and with
    ``conditioning=None`` so are the outputs, bit for bit. Blocks after the last
    of ``out_indices``, and with them the final norm, are not kept, so that
    every parameter gets a gradient; a classifier's checkpoint loads
    all the same. Images of any size are padded to whole patches, and the
    position embedding is interpolated to their grid. Attention is global:
    its cost grows with the square of the number of patches.

    Args:
        arch: A name that mmpretrain knows (``"deit-tiny"``, ``"deit-small"``,
            ``"base"`` and ``"large"`` are the usual Ti, S, B and L; its
            ``"small"`` has width 768 and 8 blocks), or a dict with
            ``embed_dims``, ``num_layers``, ``num_heads``, ``feedforward_channels``.
        conditioning: None, or a dict such as
            ``dict(type='IdentityCorrection', scale=1.0)`` for the fused qkv
            projection of every block. Dot-product attention starts one-hot at
            the paper's lambda = 10; a warning tells so at construction.
        out_indices: Blocks whose outputs are returned.
        frozen_stages: n freezes the stem (patches, positions, tokens and
            ``pre_norm``) and blocks 0 to n - 1, and the final norm with the last
            block; 0 freezes the stem, where mmpretrain freezes nothing; -1
            freezes nothing.
        with_cp: Whether blocks are recomputed in the backward pass (non-reentrant).
        pretrained_grid: Rows and columns of patches of the checkpoints that are
            loaded. Needed for a file that does not say its grid (ours do) and
            was trained on other than square images.
        init_cfg: Scratch initialisation (default: truncated normal of std
            0.02, and mmpretrain's Xavier-uniform draw in the feed-forward
            layers), or ``dict(type='Pretrained', checkpoint=..., prefix='backbone.')``, see
            :class:`mmspectral.models.sites.ConditionedBackbone`.
        **kwargs: mmpretrain's other arguments.

    Raises:
        ValueError: Unknown ``arch``; ``out_indices`` or ``frozen_stages`` out of range.
    """

    def __init__(
        self,
        arch: str | dict = "base",
        *,
        conditioning: dict | None = None,
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        with_cp: bool = False,
        pretrained_grid: Sequence[int] | None = None,
        init_cfg: dict | list | None = None,
        **kwargs,
    ) -> None:
        conditioning = build_conditioning(conditioning)
        if isinstance(arch, str) and arch.lower() not in self.arch_zoo:
            raise ValueError(
                f"unknown {type(self).__name__} arch {arch!r}; choose {', '.join(self.arch_zoo)} or give a dict."
            )
        super().__init__(arch, init_cfg=init_cfg or self.scratch_init_cfg, **kwargs)
        check_frozen_stages(frozen_stages, self.num_layers)
        self.out_indices = resolve_indices(out_indices, self.num_layers, "block")
        self.frozen_stages = frozen_stages
        self.with_cp = with_cp
        self.pretrained_grid = None if pretrained_grid is None else tuple(pretrained_grid)
        self.whole_depths = dict(layers=self.num_layers)
        self.probe_length = min(self.num_extra_tokens + math.prod(self.patch_resolution), 1024)
        if max(self.out_indices) + 1 < self.num_layers:
            # A parameter that gets no gradient stops DistributedDataParallel.
            self.num_layers = max(self.out_indices) + 1
            del self.layers[self.num_layers :]
            if self.final_norm:
                self.final_norm = False
                del self.ln1
        for i, layer in enumerate(self.layers):
            self._replace_attention(layer, conditioning, i)
        self.register_state_dict_post_hook(_write_grid)
        self.finish([self.layers], RecomputedEncoderLayer)

    @property
    def out_channels(self) -> list[int]:
        """Channels of each output."""
        return [self.embed_dims] * len(self.out_indices)

    @property
    def out_strides(self) -> list[int]:
        """Stride of each output map."""
        return [self.patch_embed.projection.stride[0]] * len(self.out_indices)

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Return (depth, number of depths) of a parameter, for layer-wise learning-rate decay.

        The stem has depth 0, block i depth i + 1; what comes after (final norm,
        or anything without ``prefix``) is last.
        """
        num_depths = self.num_layers + 2
        name = param_name.removeprefix(prefix) if param_name.startswith(prefix) else ""
        head, _, rest = name.partition(".")
        if head in ("patch_embed", "pos_embed", "pre_norm", *TOKENS):
            return 0, num_depths
        if head == "layers":
            return int(rest.split(".")[0]) + 1, num_depths
        return num_depths - 1, num_depths

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that the published recipes do not decay."""
        return {"pos_embed", *TOKENS} & {name for name, _ in self.named_parameters(recurse=False)}

    def _replace_attention(self, layer: TransformerEncoderLayer, conditioning: Conditioning | None, index: int) -> None:
        layer.attn = adopt(SpectralMultiheadAttention, layer.attn)
        condition_qkv(layer.attn, conditioning)

    def _tokens(self) -> list[nn.Parameter]:
        tokens = (getattr(self, name, None) for name in TOKENS)
        return [token for token in tokens if token is not None]

    def _freeze_stages(self) -> None:
        n = self.frozen_stages
        if n < 0:
            return
        modules = [self.patch_embed, self.drop_after_pos, self.pre_norm, *list(self.layers)[:n]]
        if n >= len(self.layers):
            modules += [getattr(self, name) for name in ("ln1", "ln2") if hasattr(self, name)]
        freeze(modules)
        for parameter in (self.pos_embed, *self._tokens()):
            parameter.requires_grad = False

    def _prepare_pos_embed(self, state_dict: dict, prefix: str, local_metadata: dict, *args) -> None:
        """Fit a loaded position embedding to this model's grid and tokens (a pre-hook that mmpretrain registers)."""
        name = f"{prefix}pos_embed"
        loaded = state_dict.get(name)
        if loaded is None or loaded.ndim != 3 or loaded.shape[2] != self.embed_dims:
            return  # load_state_dict itself reports these
        stated = self.pretrained_grid or local_metadata.get(GRID_KEY)
        tokens = sum(f"{prefix}{token}" in state_dict for token in TOKENS)
        own_grid = tuple(self.patch_resolution)
        grid = find_grid(loaded.shape[1], stated, own_grid, tokens)
        state_dict[name] = fit_pos_embed(loaded, grid, self.pos_embed, own_grid, self.interpolate_mode, tokens)
        if state_dict[name] is not loaded:
            sizes = f"{tuple(loaded.shape)} on grid {grid} to {tuple(self.pos_embed.shape)} on grid {own_grid}"
            print_log(f"{name} of the checkpoint fitted from {sizes}.", "current")

    def is_cut(self, name: str) -> bool:
        head, _, rest = name.partition(".")
        later = head == "layers" and len(self.layers) <= index_in(rest) < self.whole_depths["layers"]
        return (
            later or (head in TOKENS and getattr(self, head, None) is None) or (head == "ln1" and not self.final_norm)
        )

    def may_lack(self, name: str) -> bool:
        """The distillation token, for weights of the plain form."""
        return name == "dist_token"


class RecomputedEncoderLayer(Recomputed, TransformerEncoderLayer):
    pass


def _write_grid(module: SpectralViT, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    local_metadata[GRID_KEY] = list(module.patch_resolution)

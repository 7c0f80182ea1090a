"""XCiT with spectral conditioning, for classification and for dense features."""

import math
from collections.abc import Sequence

import torch
from mmengine.model import BaseModule
from mmengine.model.weight_init import trunc_normal_
from mmpretrain.models.backbones.xcit import ClassAttentionBlock, XCABlock, XCiT
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmspectral.layers import build_conditioning
from mmspectral.models.attention.adopt import adopt, condition_qkv
from mmspectral.models.attention.xca import SpectralXCA, condition_class_attention
from mmspectral.models.sites import (
    ConditionedBackbone,
    Recomputed,
    check_frozen_stages,
    freeze,
    index_in,
    resolve_indices,
    usable_norm_cfg,
)
from mmspectral.registry import MODELS

# Published sizes. Widths, heads and layer scale: facebookresearch/xcit, xcit.py. Drop path: its detection
# configs and README for 12- and 24-block small and medium, table B.1 of arXiv 2106.09681 for the others.
ARCHITECTURES = {
    "nano-12": dict(embed_dims=128, depth=12, num_heads=4, layer_scale_init_value=1.0, drop_path_rate=0.0),
    "tiny-12": dict(embed_dims=192, depth=12, num_heads=4, layer_scale_init_value=1.0, drop_path_rate=0.0),
    "tiny-24": dict(embed_dims=192, depth=24, num_heads=4, layer_scale_init_value=1e-5, drop_path_rate=0.05),
    "small-12": dict(embed_dims=384, depth=12, num_heads=8, layer_scale_init_value=1.0, drop_path_rate=0.05),
    "small-24": dict(embed_dims=384, depth=24, num_heads=8, layer_scale_init_value=1e-5, drop_path_rate=0.1),
    "medium-24": dict(embed_dims=512, depth=24, num_heads=8, layer_scale_init_value=1e-5, drop_path_rate=0.15),
    "large-24": dict(embed_dims=768, depth=24, num_heads=16, layer_scale_init_value=1e-5, drop_path_rate=0.25),
}


@MODELS.register_module()
class SpectralXCiT(ConditionedBackbone, XCiT):
    """mmpretrain's XCiT with conditioned q, k and v projections.

    Parameter names are those of mmpretrain's XCiT, and with ``conditioning=None``
    so are the outputs, bit for bit. The backbone is built in dense form when
    ``out_type`` is not ``"cls_token"`` and ``out_indices`` names no
    class-attention block: without class-attention blocks, final norm and
    blocks after the last output, so that every parameter gets a gradient. A
    classifier's checkpoint loads into the dense form.

    Args:
        arch: A published size (see ``ARCHITECTURES``) or a dict of mmpretrain's
            arguments, such as ``dict(embed_dims=128, depth=6, num_heads=4)``.
            Arguments given by name win over those of ``arch``.
        patch_size: 16 or 8.
        conditioning: None, or a dict such as
            ``dict(type='IdentityCorrection', scale=10.0)`` for the fused qkv
            projection of every cross-covariance attention.
        class_attention_conditioning: The same for the separate q, k, v
            projections of the class-attention blocks. None by default: class
            attention is dot-product attention, which lambda = 10 makes one-hot.
        out_type: As in mmpretrain: ``"cls_token"``, ``"featmap"``,
            ``"avg_featmap"`` or ``"raw"``.
        out_indices: Blocks whose outputs are returned. Default: the last block,
            as in mmpretrain, but for ``"featmap"`` the four blocks of the official
            detection code (3, 5, 7, 11 of 12; 7, 11, 15, 23 of 24), or the last one
            before class attention for other depths.
        frozen_stages: n freezes the stem and blocks 0 to n - 1, class-attention
            blocks last, and the final norm with the last one; -1 freezes nothing.
        norm_eval: Whether batch norms stay in eval mode during training.
        with_cp: Whether blocks are recomputed in the backward pass (non-reentrant).
            Batch norms of the local patch interaction then see every batch twice,
            which doubles the weight of new batches in their running statistics.
        bn_norm_cfg: Norm of stem and local patch interaction; SyncBN falls
            back to BN without CUDA.
        init_cfg: Scratch initialisation (default: truncated normal of std 0.02,
            as in the official code), or ``dict(type='Pretrained',
            checkpoint=..., prefix='backbone.')``, see
            :class:`mmspectral.models.sites.ConditionedBackbone`.
        **kwargs: mmpretrain's other arguments.

    Raises:
        ValueError: Unknown ``arch``; ``out_indices`` or ``frozen_stages`` out of range.
    """

    def __init__(
        self,
        arch: str | dict = "small-12",
        patch_size: int = 16,
        conditioning: dict | None = None,
        class_attention_conditioning: dict | None = None,
        out_type: str = "cls_token",
        out_indices: int | Sequence[int] | None = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        bn_norm_cfg: dict = dict(type="BN"),
        init_cfg: dict | None = None,
        **kwargs,
    ) -> None:
        conditioning = build_conditioning(conditioning)
        class_attention_conditioning = build_conditioning(class_attention_conditioning)
        kwargs = _arch_settings(arch, kwargs)
        depth = kwargs["depth"]
        whole_depths = dict(xca_layers=depth, ca_layers=kwargs.get("cls_attn_layers", 2))
        out_indices = _resolve_indices(out_indices, out_type, depth, kwargs.get("cls_attn_layers", 2))
        self.dense = out_type != "cls_token" and max(out_indices) < depth
        if self.dense:
            kwargs.update(depth=max(out_indices) + 1, cls_attn_layers=0, final_norm=False)
        check_frozen_stages(frozen_stages, kwargs["depth"] + kwargs.get("cls_attn_layers", 2))
        super().__init__(
            patch_size=patch_size,
            out_type=out_type,
            out_indices=out_indices,
            frozen_stages=frozen_stages,
            bn_norm_cfg=usable_norm_cfg(bn_norm_cfg),
            init_cfg=init_cfg or self.scratch_init_cfg,
            **kwargs,
        )
        self.whole_depths = whole_depths
        self.patch_size = patch_size
        self.norm_eval = norm_eval
        self.with_cp = with_cp
        if self.dense:
            # A parameter that gets no gradient stops DistributedDataParallel.
            del self.cls_token
            self.register_buffer("cls_token", torch.zeros(1, 1, self.embed_dims), persistent=False)
        if self.use_pos_embed:
            self.pos_embed.token_projection.register_forward_pre_hook(_in_dtype_of_weight)
        if not hasattr(self, "norm"):
            self.norm = nn.Identity()  # mmpretrain's forward calls it
        for i, block in enumerate(self.xca_layers):
            block.attn = adopt(SpectralXCA, block.attn)
            condition_qkv(block.attn, conditioning)
            if with_cp:
                self.xca_layers[i] = adopt(RecomputedXCABlock, block)
        for block in self.ca_layers:
            condition_class_attention(block.attn, class_attention_conditioning)
        self.finish([self.ca_layers], RecomputedClassAttentionBlock)

    @property
    def out_channels(self) -> list[int]:
        """Channels of each output."""
        return [self.embed_dims] * len(self.out_indices)

    @property
    def out_strides(self) -> list[int]:
        """Stride of each output map."""
        return [self.patch_size] * len(self.out_indices)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map images [B, 3, H, W] to one output per index; maps are [B, D, ceil(H / p), ceil(W / p)].

        Raises:
            ValueError: Training batch norm on a single position.
        """
        self._check_batch_norm_input(x)
        return super().forward(x)

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Return (depth, number of depths) of a parameter, for layer-wise learning-rate decay.

        The stem has depth 0, block i depth i + 1, class-attention blocks follow;
        what comes after (final norm, or anything without ``prefix``) is last.
        """
        num_depths = self.num_layers + 2
        name = param_name.removeprefix(prefix) if param_name.startswith(prefix) else ""
        head, _, rest = name.partition(".")
        if head in ("patch_embed", "pos_embed"):
            return 0, num_depths
        if head == "xca_layers":
            return int(rest.split(".")[0]) + 1, num_depths
        if head == "cls_token":
            return len(self.xca_layers), num_depths
        if head == "ca_layers":
            return len(self.xca_layers) + int(rest.split(".")[0]) + 1, num_depths
        return num_depths - 1, num_depths

    def _init_from_scratch(self) -> None:
        BaseModule.init_weights(self)  # mmpretrain's expects no list
        trunc_normal_(self.cls_token, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that the official code does not decay."""
        return {"cls_token"} & {name for name, _ in self.named_parameters(recurse=False)}

    def _freeze_stages(self) -> None:
        n = self.frozen_stages
        if n < 0:
            return
        stem = [self.patch_embed, self.pos_drop] + ([self.pos_embed] if self.use_pos_embed else [])
        freeze([*stem, *[*self.xca_layers, *self.ca_layers][:n]])
        if not self.dense and n > len(self.xca_layers):
            self.cls_token.requires_grad = False
        if n >= self.num_layers:
            freeze([self.norm])

    def _check_batch_norm_input(self, x: Tensor) -> None:
        positions = x.shape[0] * math.ceil(x.shape[2] / self.patch_size) * math.ceil(x.shape[3] / self.patch_size)
        if positions == 1 and any(isinstance(m, _BatchNorm) and m.training for m in self.modules()):
            raise ValueError(
                f"an input of shape {tuple(x.shape)} is a single {self.patch_size}-pixel patch, and "
                "batch norm in training needs more than one value per channel: "
                "use a larger image, a larger batch, or norm_eval=True."
            )

    def is_cut(self, name: str) -> bool:
        if not self.dense:
            return False
        head, _, rest = name.partition(".")
        if head in self.whole_depths:
            first = len(self.xca_layers) if head == "xca_layers" else 0
            return first <= index_in(rest) < self.whole_depths[head]
        return head in ("cls_token", "norm")


class RecomputedXCABlock(Recomputed, XCABlock):
    pass


class RecomputedClassAttentionBlock(Recomputed, ClassAttentionBlock):
    pass


def _in_dtype_of_weight(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Let a model cast to float16, bfloat16 or float64 use its float32 position encoding."""
    return (inputs[0].to(module.conv.weight.dtype),)


def _arch_settings(arch: str | dict, kwargs: dict) -> dict:
    if isinstance(arch, dict):
        settings = dict(arch)
    elif arch in ARCHITECTURES:
        # Only nano-12 normalises the class token alone (the authors' code; timm and mmpretrain's configs, too).
        settings = dict(ARCHITECTURES[arch], tokens_norm=arch != "nano-12")
    else:
        raise ValueError(f"unknown XCiT arch {arch!r}; choose {', '.join(ARCHITECTURES)} or give a dict.")
    settings.update(kwargs)
    settings.setdefault("depth", 12)
    return settings


def _resolve_indices(indices: int | Sequence[int] | None, out_type: str, depth: int, class_blocks: int) -> list[int]:
    if indices is None:
        indices = {12: (3, 5, 7, 11), 24: (7, 11, 15, 23)}.get(depth, (depth - 1,)) if out_type == "featmap" else [-1]
    return resolve_indices(indices, depth + class_blocks, "block", f", the last {class_blocks} of them class attention")

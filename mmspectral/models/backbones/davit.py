"""DaViT with spectral conditioning, for classification and for dense features."""

from collections.abc import Sequence

from mmcv.cnn.bricks.transformer import PatchEmbed
from mmpretrain.models.backbones.davit import DaViT, DaViTBlock, DaViTDownSample
from torch import Tensor, nn

from mmspectral.layers import build_conditioning
from mmspectral.models.attention.adopt import adopt, condition_qkv
from mmspectral.models.attention.channel import SpectralChannelAttention
from mmspectral.models.attention.window import SpectralDaViTWindowMSA
from mmspectral.models.sites import Recomputed, StagedBackbone, check_frozen_stages, resolve_indices
from mmspectral.registry import MODELS


@MODELS.register_module()
class SpectralDaViT(StagedBackbone, DaViT):
    """mmpretrain's DaViT with conditioned q, k and v projections in window and channel attention.

    Parameter names are those of mmpretrain's DaViT, and with ``conditioning=None``
    so are the outputs, bit for bit, wherever a map has even sides before each
    downsampling (images with sides that are multiples of 32). For other sizes
    mmpretrain drops the last row or column or stops; here, as in the official
    code, the map is padded with zeros.

    mmpretrain's DaViT differs from the official code (github.com/dingmyu/davit)
    and from timm in two places that its converted weights feel: the padding of
    the stem, and a classifier's final norm, which stands before the average over
    positions instead of after it. ``stem_padding=3`` and, for a classifier,
    ``gap_before_final_norm=True`` give the official model; use them with official
    or timm weights.

    Stages after the last of ``out_indices`` are not built, so that every
    parameter gets a gradient. A classifier's checkpoint loads into the dense form.

    Args:
        arch: ``"tiny"``, ``"small"``, ``"base"`` or another of mmpretrain's sizes,
            or a dict of ``embed_dims``, ``depths`` and ``num_heads``.
        conditioning: None, or a dict such as
            ``dict(type='IdentityCorrection', scale=10.0)`` for the fused qkv
            projection of every window attention.
        channel_conditioning: The same for every channel attention. None by
            default, because C in k and v makes it one-hot at initialisation long
            before lambda = 10, whereas ``targets=('q',)`` leaves its logits alone:
            :class:`mmspectral.models.attention.channel.SpectralChannelAttention`
            has the numbers.
        out_indices: Stages whose outputs are returned. Default: the last one. Detection takes (0, 1, 2, 3).
        pad_small_map: Whether maps smaller than a window are padded; otherwise
            they are refused, as is mmpretrain's default. Nothing else depends on it.
        stem_padding: ``"same"`` (mmpretrain) or 3 (official code).
        gap_before_final_norm: Whether outputs are averaged over positions and then
            normalised, [B, C]; such a classifier has no ``neck``.
        frozen_stages: n freezes the stem and the stages 0 to n with their norms
            (mmpretrain's count: 0 freezes a stage, 3 and 4 everything); -1 freezes nothing.
        with_cp: Whether blocks are recomputed in the backward pass (non-reentrant).
        init_cfg: Scratch initialisation (default: truncated normal of std 0.02, as
            in the official code), or ``dict(type='Pretrained', checkpoint=...,
            prefix='backbone.')``, see
            :class:`mmspectral.models.sites.ConditionedBackbone`.
        **kwargs: mmpretrain's other arguments, without ``out_after_downsample``.

    Raises:
        ValueError: Unknown ``arch``; ``out_indices`` or ``frozen_stages`` out of range.
    """

    def __init__(
        self,
        arch: str | dict = "tiny",
        conditioning: dict | None = None,
        channel_conditioning: dict | None = None,
        out_indices: int | Sequence[int] = -1,
        pad_small_map: bool = True,
        stem_padding: int | str = "same",
        gap_before_final_norm: bool = False,
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
        **kwargs,
    ) -> None:
        conditioning, channel_conditioning = build_conditioning(conditioning), build_conditioning(channel_conditioning)
        if kwargs.get("out_after_downsample"):
            raise ValueError(
                "out_after_downsample=True is not supported: mmpretrain builds its norms for the channels "
                "before downsampling. Take the outputs before it."
            )
        num_stages = len(self.settings_of(arch)["depths"])
        out_indices = tuple(sorted(set(resolve_indices(out_indices, num_stages, "stage"))))
        check_frozen_stages(frozen_stages, num_stages)
        super().__init__(
            arch=arch,
            out_indices=out_indices,
            pad_small_map=pad_small_map,
            frozen_stages=frozen_stages,
            init_cfg=init_cfg or self.scratch_init_cfg,
            **kwargs,
        )
        self.gap_before_final_norm = gap_before_final_norm
        self.with_cp = with_cp
        stem = self.patch_embed.projection
        self.patch_size = stem.stride[0]
        if stem_padding != "same":
            self.patch_embed = PatchEmbed(
                stem.in_channels,
                stem.out_channels,
                kernel_size=stem.kernel_size,
                stride=stem.stride,
                padding=stem_padding,
                norm_cfg=dict(type="LN"),
            )
        self._count_blocks()
        last = out_indices[-1]
        del self.stages[last + 1 :]
        self.stages[last].downsample = None
        for stage in self.stages:
            for block in stage.blocks:
                window, channel = block.spatial_block.attn, block.channel_block
                window.w_msa = adopt(SpectralDaViTWindowMSA, window.w_msa)
                condition_qkv(window.w_msa, conditioning)
                channel.attn = adopt(SpectralChannelAttention, channel.attn)
                condition_qkv(channel.attn, channel_conditioning)
            if stage.downsample is not None:
                stage.downsample = adopt(AnySizeDownSample, stage.downsample)
        if gap_before_final_norm:
            for i in out_indices:
                setattr(self, f"norm{i}", adopt(NormOfMean, getattr(self, f"norm{i}")))
        self.probe_length = self.stages[0].blocks[0].spatial_block.attn.window_size ** 2
        self.finish([stage.blocks for stage in self.stages], RecomputedDaViTBlock)

    @property
    def out_strides(self) -> list[int]:
        """Stride of each output map."""
        return [self.patch_size * 2**i for i in self.out_indices]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map images [B, 3, H, W] to one output per index; maps are [B, C_i, ceil(H / s_i), ceil(W / s_i)]."""
        outs = super().forward(x)
        if self.gap_before_final_norm:
            outs = (getattr(self, f"norm{i}").of_mean(out) for i, out in zip(self.out_indices, outs, strict=True))
        return tuple(outs)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the official recipe names as free of weight decay: none.

        DaViT has no position embedding and no bias table; biases and norms are the
        business of the optimizer's ``paramwise_cfg``.
        """
        return set()

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Return (depth, number of depths) of a parameter, for layer-wise learning-rate decay.

        The stem has depth 0, the blocks (window and channel attention together)
        follow from 1, and a downsampling layer has the depth of the block before
        it; norms of outputs, and anything without ``prefix``, are last.
        """
        depths = [len(stage.blocks) for stage in self.stages]
        num_depths = sum(depths) + 2
        name = param_name.removeprefix(prefix) if param_name.startswith(prefix) else ""
        if name.startswith("patch_embed."):
            return 0, num_depths
        if name.startswith("stages."):
            _, stage, kind, block, *_ = name.split(".")
            before = sum(depths[: int(stage)])
            return before + (int(block) + 1 if kind == "blocks" else depths[int(stage)]), num_depths
        return num_depths - 1, num_depths


class RecomputedDaViTBlock(Recomputed, DaViTBlock):
    pass


class NormOfMean(nn.LayerNorm):
    """Norm of an output that is averaged over its positions first; mmpretrain's forward gets the map as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def of_mean(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C]."""
        return super().forward(x.mean(dim=(2, 3)))


class AnySizeDownSample(DaViTDownSample):
    """mmpretrain's downsampling, with the padding applied to the map instead of the token sequence."""

    def forward(self, x: Tensor, input_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Map tokens [B, H * W, C] of a map H x W to those of a map ceil(H / 2) x ceil(W / 2), and its size."""
        x = self.norm(x).unflatten(1, input_size).permute(0, 3, 1, 2).contiguous()  # [B, C, H, W]
        x = self.projection(self.adaptive_padding(x) if self.adaptive_padding else x)
        return x.flatten(2).transpose(1, 2), tuple(x.shape[-2:])

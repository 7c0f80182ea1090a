"""Swin Transformer with spectral conditioning, for classification and for dense features."""

from collections.abc import Sequence

import torch.nn.functional as F
from mmpretrain.models.backbones import SwinTransformer
from mmpretrain.models.backbones.swin_transformer import SwinBlock

from mmspectral.layers import Conditioning, build_conditioning
from mmspectral.models.attention.adopt import adopt, condition_qkv
from mmspectral.models.attention.window import AnySizeShiftWindowMSA, SpectralWindowMSA
from mmspectral.models.sites import Recomputed, StagedBackbone, check_frozen_stages, resolve_indices
from mmspectral.registry import MODELS

# As in Microsoft's code and timm: learned positions are not decayed.
NO_WEIGHT_DECAY = ("absolute_pos_embed", "relative_position_bias_table")


@MODELS.register_module()
class SpectralSwin(StagedBackbone, SwinTransformer):
    """mmpretrain's Swin Transformer with conditioned q, k and v projections, for mmdet and mmpretrain.

    Parameter names are those of mmpretrain's (and mmdet's) Swin, and with
    ``conditioning=None`` so are the outputs, bit for bit. Stages after the last
    output are not kept, nor is the patch merging behind it, so that every
    parameter gets a gradient; a checkpoint of the whole model loads all the same.

    Window attention is dot-product attention, which lambda = 10 makes one-hot
    at initialisation; the constructor warns of it.

    Args:
        arch: ``"tiny"``, ``"small"``, ``"base"``, ``"large"`` or their first letters, or a dict of
            ``embed_dims``, ``depths`` and ``num_heads``.
        conditioning: None, or a dict such as
            ``dict(type='IdentityCorrection', scale=1.0)`` for the fused qkv
            projection of every window attention.
        out_indices: Stages whose outputs, each behind a norm of its own, are
            returned in order. Default: the last one. Detection takes ``(0, 1, 2, 3)``.
        frozen_stages: As in mmpretrain: n freezes the stem, stages 0 to n with
            the patch merging at their ends, and the norms of their outputs; -1
            freezes nothing. mmdet's Swin freezes one stage less for the same n.
        with_cp: Whether blocks are recomputed in the backward pass (non-reentrant).
        pad_small_map: What happens to a map whose short side is exactly the
            window: shifted as any other (True, as in mmdet's Swin) or not
            (False, as in Microsoft's classifier). Default: True unless the
            last stage is the only output. Smaller maps are padded in both
            cases, where mmpretrain's False stops at an assertion.
        init_cfg: Scratch initialisation (default: truncated normal of std 0.02,
            as in Microsoft's code), or ``dict(type='Pretrained',
            checkpoint=..., prefix='backbone.')``, see
            :class:`mmspectral.models.sites.ConditionedBackbone`.
        **kwargs: mmpretrain's other arguments, such as ``img_size``,
            ``window_size``, ``drop_path_rate``, ``norm_eval``, ``stage_cfgs``.

    Raises:
        ValueError: Unknown ``arch``; ``out_indices`` or ``frozen_stages`` out of range.
    """

    def __init__(
        self,
        arch: str | dict = "tiny",
        conditioning: dict | None = None,
        out_indices: int | Sequence[int] | None = None,
        frozen_stages: int = -1,
        with_cp: bool = False,
        pad_small_map: bool | None = None,
        init_cfg: dict | None = None,
        **kwargs,
    ) -> None:
        conditioning = build_conditioning(conditioning)
        num_stages = len(self.settings_of(arch)["depths"])
        out_indices = resolve_indices(-1 if out_indices is None else out_indices, num_stages, "stage")
        out_indices = tuple(sorted(set(out_indices)))
        check_frozen_stages(frozen_stages, num_stages - 1)
        if pad_small_map is None:
            pad_small_map = out_indices != (num_stages - 1,)
        super().__init__(
            arch=arch,
            out_indices=out_indices,
            frozen_stages=frozen_stages,
            pad_small_map=pad_small_map,
            init_cfg=init_cfg or self.scratch_init_cfg,
            **kwargs,
        )
        self.with_cp = with_cp
        self._count_blocks()
        self._end_at_stage(out_indices[-1])
        self.probe_length = self.stages[0].blocks[0].attn.window_size ** 2
        for i, block in enumerate(block for stage in self.stages for block in stage.blocks):
            block.with_cp = False  # mmpretrain's is reentrant
            self._replace_attention(block, conditioning, i)
        self.finish([stage.blocks for stage in self.stages], RecomputedSwinBlock)

    @property
    def out_strides(self) -> list[int]:
        """Stride of each output map."""
        strides = []
        stride = self.patch_embed.projection.stride[0]
        for stage in self.stages:
            before = stride
            if stage.downsample is not None:
                stride *= stage.downsample.sampler.stride[0]
            strides.append(stride if self.out_after_downsample else before)
        return [strides[i] for i in self.out_indices]

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Return (depth, number of depths) of a parameter, for layer-wise learning-rate decay.

        The stem has depth 0, block i (counted through the stages) depth i + 1,
        patch merging that of the block before it; what comes after (norms of
        the outputs, or anything without ``prefix``) is last.
        """
        depth, num_depths = super().get_layer_depth(param_name, prefix)
        # mmpretrain counts the position embedding as the last layer.
        return (0 if param_name == f"{prefix}absolute_pos_embed" else depth), num_depths

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that weight decay should leave alone, as timm and Microsoft's code do."""
        return {name for name, _ in self.named_parameters() if name.endswith(NO_WEIGHT_DECAY)}

    def _replace_attention(self, block: SwinBlock, conditioning: Conditioning | None, index: int) -> None:
        block.attn = adopt(AnySizeShiftWindowMSA, block.attn)
        block.attn.w_msa = adopt(SpectralWindowMSA, block.attn.w_msa)
        condition_qkv(block.attn.w_msa, conditioning)

    def _end_at_stage(self, last: int) -> None:
        """Drop what lies behind the output of stage ``last``, after its rates of drop path are set."""
        if not self.out_after_downsample:
            self.stages[last].downsample = None
        del self.stages[last + 1 :]
        self.num_layers = last + 1
        self.depths = self.depths[: last + 1]
        self.num_features = self.num_features[: last + 1]

    def _freeze_stages(self) -> None:
        super()._freeze_stages()
        if self.frozen_stages >= 0:
            self.drop_after_pos.eval()
            if self.use_abs_pos_embed:
                self.absolute_pos_embed.requires_grad = False

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        """Take the names of mmcls before September 2021, too, which mmpretrain does for its own class alone."""
        last = self.whole_depths["stages"] - 1
        for name in [name for name in state_dict if name.startswith(prefix)]:
            if name.startswith(f"{prefix}norm."):
                state_dict[f"{prefix}norm{last}.{name.removeprefix(f'{prefix}norm.')}"] = state_dict.pop(name)
            elif name.endswith(".attn.attn_mask"):
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _prepare_relative_position_bias_table(self, state_dict: dict, prefix: str, *args) -> None:
        """Resize the bias tables of a checkpoint with another window, bicubically as Microsoft's code does.

        mmpretrain, whose load hook this is, calls SciPy's ``interp2d``, removed in
        SciPy 1.14, and drops the position index without rebuilding it.
        """
        for name, own in self.named_parameters():
            table = state_dict.get(prefix + name)
            if not name.endswith("relative_position_bias_table") or table is None or table.ndim != 2:
                continue
            old, new = (round(t.shape[0] ** 0.5) for t in (table, own))
            if old == new or old**2 != table.shape[0]:
                continue  # load_state_dict itself reports what does not fit
            grid = table.float().t().reshape(1, -1, old, old)  # [1, h, 2 * Wh - 1, 2 * Ww - 1]
            grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
            state_dict[prefix + name] = grid.flatten(2).squeeze(0).t().to(table.dtype)
            index = name.replace("bias_table", "index")
            state_dict[prefix + index] = self.get_buffer(index)


class RecomputedSwinBlock(Recomputed, SwinBlock):
    pass

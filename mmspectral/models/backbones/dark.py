"""ViT, DeiT and Swin with DARK attention, of linear cost: over all tokens, or over the whole map of each stage."""

import math

from mmpretrain.models.backbones.davit import ConvPosEnc
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from torch import Tensor, nn

from mmspectral.layers import Conditioning, share_geometry
from mmspectral.models.attention.adopt import adopt, condition_qkv
from mmspectral.models.attention.dark import DarkMapAttention, DarkMultiheadAttention
from mmspectral.models.backbones.deit import SpectralDeiT
from mmspectral.models.backbones.swin import SpectralSwin
from mmspectral.models.backbones.vit import SpectralViT
from mmspectral.registry import MODELS

WINDOW_BUFFERS = ("relative_position_bias_table", "relative_position_index")
TRAINABLE = ("all", "projections")


class DarkBackbone:
    """Mix-in of backbones with DARK attention; put it before the backbone's class.

    ``trainable="projections"`` is the limited regime of arXiv 2603.04127: only the
    q, k and v projections and what softmax weights do not have are trained. What
    is not the backbone's, such as a head, is trained all the same.
    """

    trained_parts = (".qkv.", ".kernel.")  # of names, under trainable="projections"

    def __init__(self, *args, kernel: dict | None, trainable: str = "all", **kwargs) -> None:
        if trainable not in TRAINABLE:
            raise ValueError(f"trainable must be one of {', '.join(map(repr, TRAINABLE))}, got {trainable!r}.")
        self.kernel, self.trainable = kernel, trainable  # the backbone's constructor needs them
        super().__init__(*args, **kwargs)
        share_geometry(self)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that the published recipes do not decay, and all of the kernels."""
        return super().no_weight_decay() | {name for name, _ in self.named_parameters() if ".kernel." in name}

    def may_lack(self, name: str) -> bool:
        """What softmax weights do not have."""
        return ".kernel." in name or ".cpe." in name or super().may_lack(name)

    def _freeze_stages(self) -> None:
        super()._freeze_stages()
        if self.trainable == "projections":
            for name, parameter in self.named_parameters():
                if not any(part in name for part in self.trained_parts):
                    parameter.requires_grad = False


class DarkTransformer(DarkBackbone):
    """Global DARK attention in every block of a plain transformer; put it before its class."""

    def _replace_attention(self, layer: TransformerEncoderLayer, conditioning: Conditioning | None, index: int) -> None:
        layer.attn = adopt(DarkMultiheadAttention, layer.attn)
        condition_qkv(layer.attn, conditioning)
        layer.attn.set_kernel(self.kernel, index)


@MODELS.register_module()
class DarkViT(DarkTransformer, SpectralViT):
    """ViT with DARK attention (arXiv 2603.04127) in every block: its cost grows linearly with the number of patches.

    Class token, position embedding and parameter names are those of
    :class:`SpectralViT`; each attention layer adds ``attn.kernel``, so that weights
    of softmax attention load and the loader lists the kernels as not in the
    file. Calibrate M on such weights before training
    (:class:`mmspectral.engine.hooks.DarkCalibrationHook`).

    Args:
        arch: As in :class:`SpectralViT`.
        kernel: A dict for :func:`mmspectral.layers.build_kernel`, such as
            ``dict(type='dark', num_features=128, proposal='sharp', shift='fixed')``;
            None is exact softmax.
        trainable: ``"all"``, or ``"projections"`` for q, k, v and kernels alone.
        **kwargs: As in :class:`SpectralViT`, ``conditioning`` among them.

    Raises:
        ValueError: As in :class:`SpectralViT`, or a value that the kernel refuses.
        KeyError: Unknown type of kernel.
        TypeError: An argument that the kernel does not have.
    """


@MODELS.register_module()
class DarkDeiT(DarkTransformer, SpectralDeiT):
    """DeiT with DARK attention in every block; arguments of :class:`DarkViT` and of :class:`SpectralDeiT`."""


@MODELS.register_module()
class DarkSwin(DarkBackbone, SpectralSwin):
    """Swin with DARK attention (arXiv 2603.04127) over the whole map of each stage, without windows and shifts.

    Names are those of :class:`SpectralSwin`, so that weights of softmax windows
    load. Their relative position bias belongs to windows and is left out;
    position enters by a depthwise 3 x 3 convolution with residual before the
    attention of each block (``cpe``; conditional positional encoding, arXiv
    2102.10882), which starts at zero, where it changes nothing. The loader lists
    ``cpe`` and ``attn.w_msa.kernel`` as not in the file, the bias tables as not
    used. Maps of any size are taken as they are.

    Args:
        arch: As in :class:`SpectralSwin`.
        kernel: As in :class:`mmspectral.models.DarkViT`; None is exact softmax over the whole map.
        trainable: ``"all"``, or ``"projections"`` for q, k, v, kernels and ``cpe``.
        **kwargs: As in :class:`SpectralSwin`; ``window_size`` and ``pad_small_map`` have no effect.

    Raises:
        ValueError: As in :class:`SpectralSwin`, or a value that the kernel refuses.
        KeyError: Unknown type of kernel.
        TypeError: An argument that the kernel does not have.
    """

    trained_parts = (*DarkBackbone.trained_parts, ".cpe.")

    def warn_if_saturated(self) -> None:
        """Warn when attention starts one-hot on as many tokens as the first map has, 1024 at most."""
        self.probe_length = min(math.prod(self.patch_resolution), 1024)
        super().warn_if_saturated()

    def _replace_attention(self, block: SwinBlock, conditioning: Conditioning | None, index: int) -> None:
        block.attn = DarkMapAttention(block.attn)
        condition_qkv(block.attn.w_msa, conditioning)
        block.attn.w_msa.set_kernel(self.kernel, index)
        block.cpe = ConvPosEnc(block.attn.w_msa.embed_dims)
        for parameter in block.cpe.parameters():
            nn.init.zeros_(parameter)
        block.register_forward_pre_hook(_encode_positions)

    def is_cut(self, name: str) -> bool:
        return name.endswith(WINDOW_BUFFERS) or super().is_cut(name)


def _encode_positions(block: SwinBlock, inputs: tuple[Tensor, tuple[int, int]]) -> tuple[Tensor, tuple[int, int]]:
    x, hw_shape = inputs
    return block.cpe(x, hw_shape), hw_shape

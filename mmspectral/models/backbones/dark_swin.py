"""Swin whose attention of linear cost spans the whole map of each stage."""

import math

from mmpretrain.models.backbones.davit import ConvPosEnc
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from torch import Tensor, nn

from mmspectral.models.attention.dark import DarkMapAttention
from mmspectral.models.backbones.swin import SpectralSwin
from mmspectral.models.dark_sites import DarkBackbone
from mmspectral.registry import MODELS

WINDOW_BUFFERS = ("relative_position_bias_table", "relative_position_index")


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

    def _replace_attention(self, block: SwinBlock, conditioning: dict | None, index: int) -> None:
        block.attn = DarkMapAttention.from_stock(block.attn, conditioning, self.kernel, index)
        block.cpe = ConvPosEnc(block.attn.w_msa.embed_dims)
        for parameter in block.cpe.parameters():
            nn.init.zeros_(parameter)
        block.register_forward_pre_hook(_encode_positions)

    def _is_cut(self, name: str) -> bool:
        return name.endswith(WINDOW_BUFFERS) or super()._is_cut(name)


def _encode_positions(block: SwinBlock, inputs: tuple[Tensor, tuple[int, int]]) -> tuple[Tensor, tuple[int, int]]:
    x, hw_shape = inputs
    return block.cpe(x, hw_shape), hw_shape

"""ViT and DeiT with attention of linear cost in every block."""

from mmpretrain.models.utils import MultiheadAttention

from mmspectral.models.attention.dark import DarkMultiheadAttention
from mmspectral.models.backbones.deit import SpectralDeiT
from mmspectral.models.backbones.vit import SpectralViT
from mmspectral.models.dark_sites import DarkBackbone
from mmspectral.registry import MODELS


class DarkTransformer(DarkBackbone):
    """Global DARK attention in every block of a plain transformer; put it before its class."""

    def _make_attention(
        self, stock: MultiheadAttention, conditioning: dict | None, index: int
    ) -> DarkMultiheadAttention:
        return DarkMultiheadAttention.from_stock(stock, conditioning, self.kernel, index)


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

"""A pyramid from the equally strided maps of a plain backbone."""

from collections.abc import Sequence

from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn

from mmspectral.arguments import FLAG, TYPED, checked, either, listed, optional, real, whole
from mmspectral.models.sites import usable_norm_cfg
from mmspectral.registry import MODELS


@MODELS.register_module()
class Feature2Pyramid(BaseModule):
    """Resize maps of one stride to the strides of a feature pyramid.

    With ``scales=(4, 2, 1, 0.5)`` (patch 16) and ``(2, 1, 0.5, 0.25)`` (patch 8)
    the operators are those of the official XCiT detection code (its ``fpn1`` to
    ``fpn4``): all levels keep the channels, FPN follows. With
    ``from_last_map=True`` and ``halve_channels=True`` they are the up- and
    down-sampling of ViTDet's simple feature pyramid (arXiv 2203.16527).

    Args:
        in_channels: Channels D of every input map.
        scales: Output resolution over input resolution, one per level: a power
            of two from 1/4 to 4 (a smaller one is a larger max-pooling).
        norm_cfg: Norm between the two deconvolutions of scale 4; SyncBN falls
            back to BN without CUDA.
        from_last_map: Whether every level starts from the last input map; else
            level i starts from map i.
        halve_channels: Whether each deconvolution halves the channels.
        init_cfg: As in mmengine's ``BaseModule``.

    Raises:
        ValueError: A scale that is not a supported power of two.
    """

    @checked(
        in_channels=whole(1),
        scales=listed(real(above=0), least=1),
        norm_cfg=optional(TYPED),
        from_last_map=FLAG,
        halve_channels=FLAG,
        init_cfg=optional(either(TYPED, listed(TYPED))),
    )
    def __init__(
        self,
        in_channels: int,
        scales: Sequence[float] = (4, 2, 1, 0.5),
        norm_cfg: dict | None = dict(type="SyncBN"),
        from_last_map: bool = False,
        halve_channels: bool = False,
        init_cfg: dict | list | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.in_channels = in_channels
        self.scales = tuple(scales)
        self.from_last_map = from_last_map
        norm_cfg = usable_norm_cfg(norm_cfg)
        self.out_channels: list[int] = []
        self.ops = nn.ModuleList()
        for scale in self.scales:
            op, channels = _resize_op(in_channels, scale, norm_cfg, halve_channels)
            self.ops.append(op)
            self.out_channels.append(channels)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Map [B, D, H, W] maps to one [B, D_i, scale_i * H, scale_i * W] map per scale.

        Raises:
            ValueError: The number of maps does not fit the scales.
        """
        if self.from_last_map:
            inputs = [inputs[-1]] * len(self.ops)
        if len(inputs) != len(self.ops):
            raise ValueError(
                f"Feature2Pyramid has {len(self.ops)} scales {self.scales} but got {len(inputs)} maps; "
                "give the backbone as many out_indices as there are scales, or set from_last_map=True."
            )
        return tuple(op(x) for op, x in zip(self.ops, inputs, strict=True))


def _resize_op(channels: int, scale: float, norm_cfg: dict | None, halve: bool) -> tuple[nn.Module, int]:
    half = channels // 2 if halve else channels
    if scale == 4:
        quarter = half // 2 if halve else half
        norm = build_norm_layer(norm_cfg, half)[1] if norm_cfg else nn.Identity()
        layers = [nn.ConvTranspose2d(channels, half, 2, 2), norm, nn.GELU(), nn.ConvTranspose2d(half, quarter, 2, 2)]
        return nn.Sequential(*layers), quarter
    if scale == 2:
        return nn.ConvTranspose2d(channels, half, 2, 2), half
    if scale == 1:
        return nn.Identity(), channels
    if 0 < scale < 1 and (1 / scale).is_integer() and int(1 / scale) & (int(1 / scale) - 1) == 0:
        kernel = int(1 / scale)
        return nn.MaxPool2d(kernel, kernel, ceil_mode=False), channels
    raise ValueError(f"Feature2Pyramid: scale must be 4, 2, 1 or a power of 1/2, got {scale}.")

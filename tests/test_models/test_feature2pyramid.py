import pytest
import torch
from torch import nn

from mmspectral.models import Feature2Pyramid


@pytest.mark.parametrize("size", [(6, 9), (7, 5)])
@pytest.mark.parametrize("scales", [(4, 2, 1, 0.5), (2, 1, 0.5, 0.25)])
def test_levels_have_the_scale_and_all_channels(scales, size):
    neck = Feature2Pyramid(16, scales).train()
    outputs = neck([torch.randn(2, 16, *size) for _ in scales])
    for out, scale in zip(outputs, scales, strict=True):
        assert out.shape == (2, 16, *(int(side * scale) for side in size))
    sum(out.sum() for out in outputs).backward()
    assert [name for name, p in neck.named_parameters() if p.grad is None] == []
    assert neck.out_channels == [16] * 4


@pytest.mark.parametrize(("scales", "official"), [((4, 2, 1, 0.5), "p16"), ((2, 1, 0.5, 0.25), "p8")])
def test_operators_are_those_of_the_official_detection_code(scales, official):
    """fpn1..fpn4 of facebookresearch/xcit, detection/backbone/xcit.py, with SyncBN as BN on the CPU."""
    D = 8
    operators = {
        "p16": [
            nn.Sequential(nn.ConvTranspose2d(D, D, 2, 2), nn.BatchNorm2d(D), nn.GELU(), nn.ConvTranspose2d(D, D, 2, 2)),
            nn.Sequential(nn.ConvTranspose2d(D, D, 2, 2)),
            nn.Identity(),
            nn.MaxPool2d(2, 2),
        ],
        "p8": [nn.ConvTranspose2d(D, D, 2, 2), nn.Identity(), nn.MaxPool2d(2, 2), nn.MaxPool2d(4, 4)],
    }[official]
    neck = Feature2Pyramid(D, scales)
    maps = [torch.randn(2, D, 8, 12) for _ in scales]
    for theirs, ours in zip(operators, neck.ops, strict=True):
        for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
            b.copy_(a)
    for theirs, out, x in zip(operators, neck(maps), maps, strict=True):
        torch.testing.assert_close(theirs(x), out)


def test_last_map_form_halves_channels_as_vitdet():
    neck = Feature2Pyramid(32, (4, 2, 1, 0.5), norm_cfg=None, from_last_map=True, halve_channels=True)
    maps = [torch.randn(1, 32, 4, 4) for _ in range(2)]
    outputs = neck(maps)
    assert [out.shape[1] for out in outputs] == neck.out_channels == [8, 16, 32, 32]
    assert torch.equal(outputs[2], maps[-1])


def test_errors():
    with pytest.raises(ValueError, match="scale must be"):
        Feature2Pyramid(8, (3,))
    with pytest.raises(ValueError, match="scale must be"):
        Feature2Pyramid(8, (0.3,))
    with pytest.raises(ValueError, match="4 scales .* but got 2 maps"):
        Feature2Pyramid(8)([torch.randn(1, 8, 4, 4)] * 2)

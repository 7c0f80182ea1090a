"""What SpectralDaViT has beside the promises of every backbone: the official form, channel attention, odd maps."""

import pytest
import torch
from mmpretrain.models.backbones.davit import DaViTDownSample
from torch import nn

from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.layers import conditioned_projections
from mmspectral.models import SpectralDaViT
from mmspectral.models.attention.adopt import adopt
from mmspectral.models.backbones.davit import AnySizeDownSample

TINY = dict(embed_dims=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8])
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
OFFICIAL = dict(stem_padding=3, gap_before_final_norm=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(**kwargs):
    return SpectralDaViT(**{"arch": TINY, **kwargs})


def test_small_maps_are_refused_on_request_as_in_stock():
    with pytest.raises(AssertionError, match="smaller than the window"):
        build(pad_small_map=False)(torch.randn(1, 3, 32, 32))


def test_window_and_channel_attention_are_conditioned_apart():
    blocks = [f"stages.{i}.blocks.{j}" for i, depth in enumerate(TINY["depths"]) for j in range(depth)]
    windows = [f"{block}.spatial_block.attn.w_msa.qkv" for block in blocks]
    assert list(conditioned_projections(build(conditioning=CONDITIONING))) == windows
    channels = [f"{block}.channel_block.attn.qkv" for block in blocks]
    assert list(conditioned_projections(build(channel_conditioning=CONDITIONING))) == channels


def test_outputs_are_described():
    assert build(arch=dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2])).out_channels == [32]
    model = build(out_indices=(2, 0))
    assert (model.out_indices, model.out_channels, model.out_strides) == ((0, 2), [16, 64], [4, 16])
    assert (build(out_indices=-2).out_channels, build(patch_size=2).out_strides) == ([64], [16])


@pytest.fixture(scope="module")
def timm_twins():
    """A classifier of ours (a backbone and a linear head) and timm's model with its weights."""
    davit = pytest.importorskip("timm.models.davit")
    torch.manual_seed(0)
    ours = build(**OFFICIAL).eval()
    for parameter in ours.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    head = nn.Linear(128, 10)
    theirs = davit.DaVit(
        depths=tuple(TINY["depths"]), embed_dims=(16, 32, 64, 128), num_heads=tuple(TINY["num_heads"]), num_classes=10
    ).eval()
    state = from_mmpretrain(ours.state_dict(), naming_of(FAMILIES["davit"], "timm"))
    state.update({f"head.fc.{name}": tensor for name, tensor in head.state_dict().items()})
    theirs.load_state_dict(state, strict=True)
    return ours, head, theirs


@pytest.mark.parametrize("size", [(224, 224), (4, 4), (32, 32), (33, 47), (70, 90), (8, 200)])
def test_equals_timm(timm_twins, size):
    """timm's model with our weights under its names gives the same logits and features."""
    ours, head, theirs = timm_twins
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(head(ours(x)[0]), theirs(x), rtol=1e-4, atol=1e-4)
    features = build(out_indices=(0, 1, 2, 3), norm_cfg=None, stem_padding=3).eval()
    state = {name: tensor for name, tensor in ours.state_dict().items() if not name.startswith("norm3")}
    features.load_state_dict(state, strict=True)
    expected = theirs.forward_intermediates(x, intermediates_only=True)
    for a, b in zip(features(x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("setting", OFFICIAL)
def test_the_official_form_is_another_function_than_mmpretrains(timm_twins, setting):
    """Why the two arguments exist: with either at mmpretrain's value the logits are not timm's."""
    ours, head, theirs = timm_twins
    x = torch.randn(2, 3, 64, 64)
    other = build(**{setting: OFFICIAL[setting]}).eval()
    other.load_state_dict(ours.state_dict(), strict=True)
    out = other(x)[0]
    logits = head(out if out.ndim == 2 else out.mean(dim=(2, 3)))
    assert (logits - theirs(x)).norm() > 1e-2 * theirs(x).norm()


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7), (5, 7), (1, 1)])
def test_downsampling_pads_the_map(size):
    """Even sides: stock's bits. Others: a map padded with zeros after the norm."""
    stock = DaViTDownSample(8, 16, norm_cfg=dict(type="LN"))
    ours = adopt(AnySizeDownSample, stock)
    H, W = size
    x = torch.randn(2, H * W, 8)
    out, out_size = ours(x, size)
    assert out_size == ((H + 1) // 2, (W + 1) // 2)
    if H % 2 == W % 2 == 0:
        assert torch.equal(out, stock(x, size)[0])
    padded = torch.zeros(2, 8, H + H % 2, W + W % 2)
    padded[:, :, :H, :W] = stock.norm(x).mT.reshape(2, 8, H, W)
    torch.testing.assert_close(out, stock.projection(padded).flatten(2).mT)

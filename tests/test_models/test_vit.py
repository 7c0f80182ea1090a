"""SpectralViT against mmpretrain's VisionTransformer, timm's, and what detection asks of a backbone."""

import copy

import pytest
import torch
from mmdet.models.necks import FPN
from mmengine.runner import load_checkpoint
from mmpretrain.models.backbones import VisionTransformer
from mmpretrain.models.utils import MultiheadAttention
from mmpretrain.models.utils.attention import scaled_dot_product_attention_pyimpl
from torch import nn

from mmspectral.checkpoints import GRID_KEY, find_grid, fit_pos_embed
from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.models.attention.dot_product import SpectralMultiheadAttention
from mmspectral.models.backbones.vit import SpectralViT
from mmspectral.models.necks import Feature2Pyramid

TINY = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=64)
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
BOTH = pytest.mark.parametrize("conditioning", [None, CONDITIONING], ids=["stock", "conditioned"])
SIZES = [(48, 64), (33, 47), (16, 130), (5, 7)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(**kwargs):
    return SpectralViT(**{"arch": TINY, "img_size": (48, 64), **kwargs})


def dense(**kwargs):
    return build(**{"out_type": "featmap", "out_indices": (0, 1, 2), **kwargs})


def randomize(model):
    """Give class token, positions and norms values that a mix-up would show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(),
        dict(out_type="featmap", out_indices=[0, 2]),
        dict(out_type="avg_featmap", with_cls_token=False, final_norm=False, pre_norm=True),
        dict(out_type="raw", layer_scale_init_value=0.1, drop_rate=0.1, layer_cfgs=dict(attn_drop_rate=0.1)),
        dict(drop_path_rate=0.5, qkv_bias=False, patch_size=8, interpolate_mode="bilinear"),
    ],
    ids=["cls_token", "featmap", "avg_featmap", "raw", "drop_path"],
)
def test_conditioning_off_is_bit_equal_to_stock(kwargs, size):
    stock = randomize(VisionTransformer(TINY, img_size=(48, 64), **copy.deepcopy(kwargs)))
    ours = build(**kwargs)
    ours.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, *size)
    for train in (False, True):
        stock.train(train)
        ours.train(train)
        outputs = []
        for model in (stock, ours):
            torch.manual_seed(2)
            outputs.append(model(x))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    for out in outputs:
        sum(o.square().sum() for o in out).backward()
    for (name, a), (_, b) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@BOTH
@pytest.mark.parametrize("size", SIZES)
def test_any_size_and_every_parameter_gets_a_gradient(conditioning, size):
    """the maps cover the image in whole patches."""
    forms = [dict(out_indices=indices) for indices in ((0, 1, 2), (0, 1), (2,), (-2,), 0)]
    forms += [dict(with_cls_token=False), dict(pre_norm=True, out_indices=1), dict(final_norm=False)]
    for form in forms:
        model = dense(conditioning=conditioning, **form).train()
        outputs = model(torch.randn(2, 3, *size))
        expected = [-(-side // 16) for side in size]
        assert [list(out.shape) for out in outputs] == [[2, 32, *expected]] * len(model.out_indices)
        sum(out.square().mean() for out in outputs).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []
        assert len(outputs) == len(model.out_channels) == len(model.out_strides)
        assert set(model.out_channels) == {32} and set(model.out_strides) == {16}
    for form in (dict(), dict(out_indices=1), dict(out_type="avg_featmap"), dict(out_type="raw", out_indices=(0, 1))):
        model = build(conditioning=conditioning, **form).train()
        sum(out.square().sum() for out in model(torch.randn(2, 3, *size))).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_pyramid_from_the_last_map_for_detection():
    model = nn.Sequential(
        dense(conditioning=CONDITIONING, out_indices=(2,)),
        Feature2Pyramid(32, norm_cfg=dict(type="BN"), from_last_map=True, halve_channels=True),
        FPN(in_channels=[8, 16, 32, 32], out_channels=16, num_outs=5),
    )
    maps = model(torch.randn(1, 3, 64, 96))
    assert [tuple(m.shape[1:]) for m in maps] == [(16, 64 // s, 96 // s) for s in (4, 8, 16, 32)] + [(16, 1, 2)]
    sum(m.square().mean() for m in maps).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def embedding_of(grid, extra=1, dim=32):
    """Channel 0 is the row of a patch, channel 1 its column, the others are noise."""
    h, w = grid
    rows, columns = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
    embedding = torch.randn(1, extra + h * w, dim, generator=torch.Generator().manual_seed(h))
    embedding[0, extra:, :2] = torch.stack((rows.flatten(), columns.flatten()), dim=-1)
    return embedding


@pytest.mark.parametrize("through_file", [False, True])
@pytest.mark.parametrize("size", [(96, 64), (80, 112), (64, 96), (64, 64)])
def test_positions_of_another_grid_are_resized_by_the_right_grid(size, through_file, tmp_path):
    """64 x 96 and 96 x 64 have equally many patches: only the file can tell them apart."""
    source = build(img_size=(64, 96))
    source.pos_embed.data = embedding_of((4, 6))
    target = nn.ModuleDict({"backbone": build(img_size=size)})
    state = nn.ModuleDict({"backbone": source}).state_dict()
    assert state._metadata["backbone"][GRID_KEY] == [4, 6]
    if through_file:
        torch.save(dict(state_dict=state), tmp_path / "file.pth")
        load_checkpoint(target, str(tmp_path / "file.pth"), strict=True)
    else:
        target.load_state_dict(state, strict=True)
    loaded = target["backbone"].pos_embed.detach()
    grid = (size[0] // 16, size[1] // 16)
    expected = nn.functional.interpolate(
        source.pos_embed[:, 1:].unflatten(1, (4, 6)).permute(0, 3, 1, 2), size=grid, mode="bicubic", align_corners=False
    )
    torch.testing.assert_close(loaded[:, 1:].unflatten(1, grid).permute(0, 3, 1, 2), expected)
    assert torch.equal(loaded[:, 0], source.pos_embed[:, 0])
    if size == (64, 96):
        assert torch.equal(loaded, source.pos_embed)
    # Row and column of each patch still grow down and to the right.
    assert (loaded[0, 1:, :2].unflatten(0, grid)[..., 0].diff(dim=0) > 0).all()
    assert (loaded[0, 1:, :2].unflatten(0, grid)[..., 1].diff(dim=1) > 0).all()


def test_files_that_do_not_say_their_grid():
    def load(length, **kwargs):
        state = {"pos_embed": torch.randn(1, length, 32), "cls_token": torch.zeros(1, 1, 32)}
        model = build(**kwargs)
        model.load_state_dict(state, strict=False)
        return state["pos_embed"], model.pos_embed

    source, loaded = load(1 + 9)  # square
    torch.testing.assert_close(loaded, fit_pos_embed(source, (3, 3), loaded, (3, 4), "bicubic"))
    source, loaded = load(1 + 12)  # as many as the model's own 3 x 4
    assert torch.equal(source, loaded)
    source, loaded = load(1 + 12, pretrained_grid=(4, 3))
    torch.testing.assert_close(loaded, fit_pos_embed(source, (4, 3), loaded, (3, 4), "bicubic"))
    assert not torch.equal(source, loaded)
    with pytest.raises(ValueError, match="21 rows, 1 of them .*neither .*`pretrained_grid=.rows, columns.`"):
        load(1 + 20)
    with pytest.raises(ValueError, match="6 x 6 and 4 x 9 would fit"):
        load(1 + 36, img_size=(64, 144))
    with pytest.raises(ValueError, match="13 rows, but a grid of 2 x 3 patches has 6"):
        load(1 + 12, pretrained_grid=(2, 3))
    with pytest.raises(RuntimeError, match="size mismatch for pos_embed"):
        build().load_state_dict({"pos_embed": torch.randn(1, 13, 16)}, strict=False)


@pytest.mark.parametrize(
    ("length", "own", "tokens", "grid"),
    [
        (197, (14, 14), 1, (14, 14)),
        (198, (32, 32), 1, (14, 14)),
        (196, (14, 14), 1, (14, 14)),
        (17, (3, 5), 1, (4, 4)),
        (17, (3, 5), 2, (3, 5)),
    ],
)
def test_grids_are_found_from_the_number_of_rows(length, own, tokens, grid):
    assert find_grid(length, None, own, tokens) == grid


@pytest.mark.parametrize(
    ("arch", "millions"), [("deit-tiny", 5.7), ("deit-small", 22.1), ("base", 86.6), ("large", 304.3)]
)
def test_published_sizes_have_the_published_parameters(arch, millions):
    with torch.device("meta"):
        model = SpectralViT(arch, conditioning=CONDITIONING)
    with_head = sum(p.numel() for p in model.parameters()) + 1000 * (model.embed_dims + 1)
    assert round(with_head / 1e6, 1) == millions


@pytest.mark.parametrize("layer_scale", [0.0, 0.1])
def test_equals_timm(layer_scale):
    """timm's model with our weights under its names gives the same tokens."""
    timm_vit = pytest.importorskip("timm.models.vision_transformer")
    ours = randomize(build(out_type="raw", layer_scale_init_value=layer_scale)).eval()
    theirs = timm_vit.VisionTransformer(
        img_size=(48, 64),
        embed_dim=32,
        depth=3,
        num_heads=4,
        mlp_ratio=2,
        num_classes=0,
        init_values=layer_scale or None,
    ).eval()
    theirs.load_state_dict(from_mmpretrain(ours.state_dict(), naming_of(FAMILIES["vit"], "timm")), strict=True)
    x = torch.randn(2, 3, 48, 64)
    torch.testing.assert_close(theirs.forward_features(x), ours(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(),
        dict(qkv_bias=False, proj_bias=False, input_dims=40, layer_scale_init_value=0.1),
        dict(
            num_heads=1,
            v_shortcut=True,
            attn_drop=0.2,
            proj_drop=0.2,
            dropout_layer=dict(type="DropPath", drop_prob=0.2),
        ),
    ],
)
def test_attention_layer_is_a_drop_in(kwargs, adopted):
    arguments = dict(dict(embed_dims=24, num_heads=3), **kwargs)
    stock, ours = MultiheadAttention(**arguments), SpectralMultiheadAttention(**arguments)
    ours.load_state_dict(stock.state_dict(), strict=True)
    shared = adopted(SpectralMultiheadAttention, stock, None)
    x = torch.randn(2, 17, arguments.get("input_dims", 24))
    outputs = []
    for layer in (stock, ours, shared):
        torch.manual_seed(1)
        outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    conditioned = adopted(SpectralMultiheadAttention, stock, CONDITIONING)
    assert conditioned.qkv.weight is stock.qkv.weight
    assert list(conditioned.state_dict()) == list(stock.state_dict())
    copy.deepcopy(conditioned)(x).sum().backward()
    assert type(SpectralMultiheadAttention(**arguments, conditioning=CONDITIONING).qkv).__name__ == "ConditionedLinear"


@pytest.mark.parametrize("qk_scale", [None, 0.2])
def test_attention_logits_are_those_of_the_forward(qk_scale):
    layer = SpectralMultiheadAttention(24, 3, conditioning=CONDITIONING, qk_scale=qk_scale).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    logits = layer.attention_logits(x)
    assert logits.shape == (2, 3, 11, 11) and logits.dtype == torch.float64
    q, k, v = layer.qkv(x).reshape(2, 11, 3, 3, 8).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(logits[1, 2, 3, 4], q[1, 2, 3] @ k[1, 2, 4] * (qk_scale or 8**-0.5))
    attended = (logits.softmax(-1) @ v).transpose(1, 2).reshape(2, 11, 24)
    torch.testing.assert_close(layer.proj(attended), layer(x), rtol=1e-12, atol=1e-12)
    low = layer.float().bfloat16().attention_logits(x.bfloat16())
    assert low.dtype == torch.float32


def test_a_stock_layer_with_qk_scale_keeps_its_function(adopted):
    """mmpretrain ignores the value and multiplies the logits by sqrt(d)."""
    stock = MultiheadAttention(24, 3, qk_scale=0.2)
    assert stock.scaled_dot_product_attention.func is scaled_dot_product_attention_pyimpl
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(adopted(SpectralMultiheadAttention, stock, None)(x), stock(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (dict(arch="vit-small"), ValueError, "unknown SpectralViT arch 'vit-small'; choose s, small"),
        (dict(out_indices=(3,)), ValueError, r"out_indices \[3\] must be .*\[-3, 3\)"),
        (dict(out_indices=()), ValueError, "out_indices"),
        (dict(frozen_stages=4), ValueError, r"frozen_stages must lie in \[-1, 3\], got 4"),
        (dict(out_type="map"), ValueError, "out_type"),
        (dict(with_cls_token=False), ValueError, "with_cls_token"),
        (dict(conditioning=dict(type="IdentityCorrection", size=3)), TypeError, "no argument 'size'"),
        (dict(patchsize=8), TypeError, "patchsize"),
    ],
)
def test_errors(kwargs, error, match):
    with pytest.raises(error, match=match):
        build(**kwargs)

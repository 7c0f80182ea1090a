"""What SpectralViT has beside the promises of every backbone: a pyramid, and positions of another grid."""

import pytest
import torch
from mmdet.models.necks import FPN
from torch import nn

from mmspectral.checkpoints import GRID_KEY, find_grid, fit_pos_embed, load_backbone
from mmspectral.models import Feature2Pyramid, SpectralViT

TINY = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=64)
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(**kwargs):
    return SpectralViT(**{"arch": TINY, "img_size": (48, 64), **kwargs})


def test_every_parameter_of_every_form_gets_a_gradient():
    forms = [dict(out_type="avg_featmap", with_cls_token=False), dict(out_type="raw", out_indices=(0, 1))]
    forms += [dict(out_type="featmap", **form) for form in (dict(pre_norm=True, out_indices=1), dict(final_norm=False))]
    for form in (*forms, dict(out_indices=1)):
        model = build(conditioning=CONDITIONING, **form).train()
        sum(out.square().sum() for out in model(torch.randn(2, 3, 33, 47))).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_pyramid_from_the_last_map_for_detection():
    model = nn.Sequential(
        build(conditioning=CONDITIONING, out_type="featmap"),
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
        report = load_backbone(target["backbone"], str(tmp_path / "file.pth"))
        assert report.resized == (("pos_embed",) if size in [(80, 112), (64, 64)] else ()) and report.share == 1
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

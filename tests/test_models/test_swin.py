"""What SpectralSwin has beside the promises of every backbone: mmdet's Swin, windows, stages that are not kept."""

import pytest
import torch
from mmpretrain.models.backbones import SwinTransformer
from mmpretrain.models.utils import WindowMSA

from mmspectral.layers import attention_layers
from mmspectral.models import SpectralSwin

TINY = dict(embed_dims=16, depths=[2, 2, 2], num_heads=[2, 4, 8])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(**kwargs):
    return SpectralSwin(**(dict(arch=TINY, window_size=4) | kwargs))


def dense(**kwargs):
    return build(**(dict(out_indices=(0, 1, 2)) | kwargs))


# With window 4 and patches of 4 the last map of 64 x 64 is exactly one window.
@pytest.mark.parametrize("size", [(64, 64), (65, 90), (128, 72), (4, 4), (3, 5), (12, 100), (33, 47), (70, 20)])
def test_dense_form_is_bit_equal_to_the_swin_of_mmdet(size):
    mmdet_backbones = pytest.importorskip("mmdet.models.backbones")
    theirs = mmdet_backbones.SwinTransformer(**TINY, strides=(4, 2, 2), window_size=4, out_indices=(0, 1, 2))
    theirs.eval()  # returns None in mmdet
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ours = dense().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, *size)
    assert all(torch.equal(a, b) for a, b in zip(theirs(x), ours(x), strict=True))


def test_classifier_is_stock_by_default_and_the_dense_form_shifts_at_the_window():
    stock, ours, last_of_dense = SwinTransformer(TINY, window_size=4, out_indices=(2,)), build().eval(), dense().eval()
    stock.eval()  # returns None in mmpretrain
    torch.nn.init.normal_(stock.stages[2].blocks[1].attn.w_msa.relative_position_bias_table)
    ours.load_state_dict(stock.state_dict(), strict=True)
    last_of_dense.load_state_dict(stock.state_dict(), strict=False)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(stock(x)[0], ours(x)[0])
    assert not torch.equal(stock(x)[0], last_of_dense(x)[-1])


def test_outputs_are_described():
    assert (dense().out_channels, dense().out_strides) == ([16, 32, 64], [4, 8, 16])
    after = dense(out_after_downsample=True)
    assert (after.out_channels, after.out_strides) == ([32, 64, 64], [8, 16, 16])
    assert build(out_indices=(-1, 0, 0)).out_indices == (0, 2)


def test_backbones_that_end_early_keep_the_drop_path_of_the_whole_model():
    early = build(out_indices=(1,), drop_path_rate=0.5)
    kept = {".".join(name.split(".")[:2]) for name in early.state_dict() if name.startswith("stages")}
    assert kept == {"stages.0", "stages.1"}
    assert not [name for name in early.state_dict() if name.startswith(("norm0", "norm2", "stages.1.downsample"))]
    rates = [block.attn.drop.drop_prob for stage in early.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_stage_settings_cannot_bring_the_reentrant_form_back():
    model = dense(stage_cfgs=dict(with_cp=True)).train()
    loss = model(torch.randn(1, 3, 32, 32))[-1].sum()
    assert torch.autograd.grad(loss, model.patch_embed.projection.weight)[0].isfinite().all()


def test_names_without_weight_decay_are_those_of_timm():
    swin_transformer = pytest.importorskip("timm.models.swin_transformer")
    theirs = swin_transformer.SwinTransformer(img_size=64, embed_dim=16, depths=(2, 2, 2), num_heads=(2, 4, 8))
    expected = {name.replace("layers", "stages").replace("attn.", "attn.w_msa.") for name in theirs.no_weight_decay()}
    assert len(expected) == 6
    assert build().no_weight_decay() == expected
    assert build(use_abs_pos_embed=True).no_weight_decay() == expected | {"absolute_pos_embed"}


def test_window_12_by_argument_and_by_the_stage_settings_of_mmpretrain_are_the_same():
    by_argument = build(img_size=384, window_size=12).eval()
    by_stage = build(img_size=384, stage_cfgs=dict(block_cfgs=dict(window_size=12)))
    by_stage.load_state_dict(by_argument.state_dict(), strict=True)
    assert by_stage.probe_length == by_argument.probe_length == 144
    assert by_argument.stages[0].blocks[0].attn.w_msa.relative_position_bias_table.shape == (23 * 23, 2)
    assert by_argument(torch.randn(1, 3, 384, 384))[0].shape == (1, 64, 24, 24)


@pytest.mark.parametrize(("old", "new"), [(4, 6), (6, 4)])
def test_bias_tables_of_another_window_are_resized(old, new):
    timm_layers = pytest.importorskip("timm.layers")
    source, target = build(window_size=old), torch.nn.ModuleDict({"backbone": build(window_size=new)})
    for layer in attention_layers(source).values():
        torch.nn.init.normal_(layer.relative_position_bias_table)
    target.load_state_dict({f"backbone.{name}": t for name, t in source.state_dict().items()}, strict=True)
    for name, layer in attention_layers(target["backbone"]).items():
        table = source.get_submodule(name).relative_position_bias_table.detach()
        shape = ((2 * new - 1) ** 2, table.shape[1])
        expected = timm_layers.resize_rel_pos_bias_table_simple(table, (new, new), shape)
        torch.testing.assert_close(layer.relative_position_bias_table.detach(), expected)
        assert torch.equal(layer.relative_position_index, WindowMSA(8, (new, new), 2).relative_position_index)

"""A load ends with the function that the weights were trained for, or with an error that says what differs."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.model.weight_init import PretrainedInit
from mmpretrain.models import backbones as stock_backbones
from torch import nn

from mmspectral import models
from mmspectral.checkpoints import fit_to_model, fold_file, load_backbone, publish, read_checkpoint, unfold_file
from mmspectral.checkpoints.names import FAMILIES as NAMES
from mmspectral.checkpoints.names import from_mmpretrain, naming_of
from mmspectral.registry import MODELS

CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
VIT = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32)
XCIT = dict(embed_dims=16, depth=3, num_heads=2)
SWIN = dict(embed_dims=16, depths=[1, 2], num_heads=[1, 2])
FAMILIES = {
    "SpectralXCiT": (dict(arch=XCIT, patch_size=8), "depth", dict(out_type="featmap")),
    "SpectralSwin": (dict(arch=SWIN, window_size=4), "depths", {}),
    "SpectralViT": (dict(arch=VIT, img_size=32), "num_layers", dict(out_type="featmap")),
    "SpectralDaViT": (dict(arch=SWIN, window_size=4), "depths", {}),
}
EACH = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(name, depth=None, **kwargs):
    settings, key, _ = FAMILIES[name]
    arch = settings["arch"] | ({key: depth} if depth else {})
    return getattr(models, name)(**settings | dict(arch=arch) | kwargs)


def randomize(model):
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 1)
    return model.eval() or model


def save(state, path, prefix=""):
    metadata = getattr(state, "_metadata", None)
    state = type(state)((prefix + name, tensor) for name, tensor in state.items())
    if metadata is not None:
        state._metadata = {f"{prefix}{name}".removesuffix("."): entry for name, entry in metadata.items()}
    torch.save(dict(state_dict=state), path)
    return str(path)


@EACH
def test_another_depth_is_refused_with_both_and_blocks_that_are_cut_are_not_missed(name, tmp_path):
    staged = isinstance(FAMILIES[name][0]["arch"].get("depths"), list)
    deep, shallow = ([1, 4], [1, 2]) if staged else (5, 3)
    source = randomize(build(name, deep, **(dict(out_indices=(0, 1)) if staged else {})))
    path = save(source.state_dict(), tmp_path / "deep.pth")
    with pytest.raises(ValueError, match=rf"deep.pth.*another depth, with {deep[1] if staged else deep} in .* {name} "):
        load_backbone(build(name, shallow), path)
    with pytest.raises(RuntimeError, match="Unexpected"):
        build(name, shallow).load_state_dict(source.state_dict(), strict=True)
    with pytest.raises(ValueError, match="deep.pth.*another depth"):
        load_backbone(build(name, shallow, out_indices=0, **FAMILIES[name][2]), path)
    cut = build(name, deep, out_indices=0, **FAMILIES[name][2])
    assert load_backbone(cut, path).share == 1
    cut.load_state_dict(source.state_dict(), strict=True)
    path = save(build(name, shallow).state_dict(), tmp_path / "shallow.pth")
    with pytest.raises(ValueError, match="shallow.pth"):
        load_backbone(build(name, deep), path)


@pytest.mark.parametrize(
    "form",
    [
        lambda path: [dict(type="Pretrained", checkpoint=path)],
        lambda path: [
            ConfigDict(type="TruncNormal", layer="Linear", std=0.02),
            ConfigDict(type="Constant", layer="LayerNorm", val=1.0),
            ConfigDict(type="Pretrained", checkpoint=path),
        ],
        lambda path: dict(type="mmengine.Pretrained", checkpoint=path),
        lambda path: dict(type=PretrainedInit, checkpoint=Path(path), map_location="cpu"),
        lambda path: dict(type="Pretrained", checkpoint=path, prefix="backbone"),
        lambda path: dict(type="Pretrained", checkpoint=path, prefix="backbone."),
    ],
    ids=["list", "list-of-three", "scoped", "class-and-path", "prefix", "prefix-with-dot"],
)
@EACH
def test_every_spelling_of_pretrained_goes_through_the_loader(name, form, tmp_path):
    source = randomize(build(name))
    model = build(name, init_cfg=form(save(source.state_dict(), tmp_path / "file.pth", "backbone.")))
    model.init_weights()
    assert all(torch.equal(tensor, source.state_dict()[n]) for n, tensor in model.state_dict().items())
    broken = build(name, init_cfg=form(str(tmp_path / "absent.pth")))
    with pytest.raises(FileNotFoundError, match="absent.pth"):
        broken.init_weights()


@EACH
def test_a_list_without_pretrained_is_an_initialisation_from_scratch(name):
    entries = [dict(type="Constant", layer=layer, val=0.25) for layer in ("Linear", "Conv2d")]
    model = build(name, init_cfg=entries)
    model.init_weights()
    assert all((m.weight == 0.25).all() for n, m in model.named_modules() if n.endswith(".qkv"))


@pytest.mark.parametrize("distillation", [False, True])
def test_tokens_without_a_row_of_positions_get_zero(distillation, tmp_path):
    """timm's no_embed_class, DeiT III: rows for patches alone."""
    model = randomize(models.SpectralDeiT(VIT, img_size=32, distillation=distillation))
    state, drawn = randomize(models.SpectralViT(VIT, img_size=32)).state_dict(), model.pos_embed.detach().clone()
    patches = state["pos_embed"] = state["pos_embed"][:, 1:]
    report = load_backbone(model, save(state, tmp_path / "file.pth"))
    assert report.missing == (("dist_token",) if distillation else ()) and report.resized == ("pos_embed",)
    assert torch.equal(model.pos_embed[:, -4:], patches) and not model.pos_embed[:, 0].any()
    assert not distillation or torch.equal(model.pos_embed[:, 1], drawn[:, 1])
    timm_vit = pytest.importorskip("timm.models.vision_transformer")
    if not distillation:
        arch = dict(embed_dim=16, depth=3, num_heads=2, mlp_ratio=2)
        theirs = timm_vit.VisionTransformer(32, **arch, num_classes=0, no_embed_class=True).eval()
        theirs.load_state_dict(from_mmpretrain(state, naming_of(NAMES["vit"], "timm")), strict=True)
        x = torch.randn(1, 3, 32, 32)
        torch.testing.assert_close(theirs(x), model(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_swin_files_of_mmcls_before_september_2021(prefix, tmp_path):
    """Norm of the output without a number, masks of the windows beside the weights."""
    settings = dict(arch=SWIN, window_size=4)
    source = randomize(models.SpectralSwin(**settings))
    old = {n.replace("norm1.", "norm.") if n.startswith("norm1.") else n: t for n, t in source.state_dict().items()}
    old["stages.1.blocks.1.attn.attn_mask"] = torch.zeros(4, 16, 16)
    path, x = save(old, tmp_path / "old.pth", prefix), torch.randn(1, 3, 64, 64)
    loaded, direct = models.SpectralSwin(**settings).eval(), models.SpectralSwin(**settings).eval()
    report = load_backbone(loaded, path)
    assert report.share == 1 and not report.missing and not report.unused and report.naming == "mmcls swin"
    nn.ModuleDict({"backbone": direct}).load_state_dict({f"backbone.{name}": t for name, t in old.items()}, strict=True)
    assert torch.equal(loaded(x)[0], source(x)[0]) and torch.equal(direct(x)[0], source(x)[0])
    dense = models.SpectralSwin(**settings, out_indices=(0, 1))
    assert load_backbone(dense, path).missing == ("norm0.weight", "norm0.bias")


@pytest.mark.parametrize(
    ("name", "change", "other"),
    [
        ("SpectralViT", dict(qkv_bias=False), "layers.0.attn.qkv.bias"),
        ("SpectralViT", dict(layer_scale_init_value=0.1), "layers.0.attn.gamma1.weight"),
        ("SpectralViT", dict(pre_norm=True), "pre_norm.weight"),
        ("SpectralXCiT", dict(use_pos_embed=False), "pos_embed.token_projection"),
        ("SpectralDaViT", dict(qkv_bias=False), "stages.0.blocks.0.spatial_block.attn.w_msa.qkv.bias"),
    ],
)
@pytest.mark.parametrize("in_file", [True, False])
def test_what_one_has_and_the_other_lacks_is_refused_by_name(name, change, other, in_file, tmp_path):
    """More than 90 % of the parameters match in each case."""
    with_it, without = build(name, **change), build(name)
    if {"qkv_bias", "use_pos_embed"} & change.keys():
        with_it, without = without, with_it
    source, target = (with_it, without) if in_file else (without, with_it)
    path = save(source.state_dict(), tmp_path / "file.pth")
    with pytest.raises(ValueError, match=f"file.pth.*would compute something else.*{other}"):
        load_backbone(target, path)
    report = load_backbone(target, path, min_matched=0.5)
    assert any(n.startswith(other) for n in (report.unused if in_file else report.missing))


def whole_model(conditioning):
    return MODELS.build(
        dict(
            type="mmspectral.ConditionedModel",
            model_type="mmpretrain.ImageClassifier",
            conditioning=conditioning,
            backbone=dict(type="mmpretrain.VisionTransformer", arch=VIT, img_size=32),
            neck=None,
            head=dict(type="AttentionHead", _scope_="mmspectral"),
            include=["head"] if conditioning else None,
        )
    )


class AttentionHead(nn.Module):
    """A head with torch's attention outside the backbone, as mmdet's transformers have it."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)


@pytest.fixture
def attention_head(monkeypatch):
    monkeypatch.setitem(MODELS._module_dict, "AttentionHead", AttentionHead)


@pytest.mark.usefixtures("attention_head")
def test_a_correction_outside_the_backbone_is_compared_too(tmp_path):
    """And such files are folded, unfolded and published."""
    trained, stock = whole_model(CONDITIONING), whole_model(None)
    path = save(trained.state_dict(), tmp_path / "trained.pth")
    with pytest.raises(ValueError, match="head.attn was trained with IdentityCorrection.*built without one"):
        fit_to_model(stock, read_checkpoint(path), path)
    weights, _ = fit_to_model(whole_model(CONDITIONING), read_checkpoint(path), path)
    assert torch.equal(weights.tensors["head.attn.in_proj_weight"], trained.head.attn.in_proj_weight)
    assert "1 corrections folded" in fold_file(path, tmp_path / "folded.pth")
    folded = str(tmp_path / "folded.pth")
    weights, _ = fit_to_model(stock, read_checkpoint(folded), folded)
    stock.load_state_dict(weights.state_dict(), strict=True)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(stock.head.attn(x, x, x)[0], trained.head.attn(x, x, x)[0], rtol=1e-5, atol=1e-5)
    assert publish(path, tmp_path / "published.pth", fold=True).exists()
    model = dict(type="mmspectral.ConditionedModel", model_type="mmspectral.AttentionHead", conditioning=CONDITIONING)
    cfg = Config(dict(default_scope="mmspectral", model=model))
    alone = save(stock.head.state_dict(), tmp_path / "alone.pth")
    unfold_file(cfg, alone, tmp_path / "unfolded.pth")
    unfolded = read_checkpoint(tmp_path / "unfolded.pth")["state_dict"]["attn.in_proj_weight"]
    torch.testing.assert_close(unfolded, trained.head.attn.in_proj_weight.detach())


def test_only_the_type_changes_of_an_xcit_config():
    for out_type in ("raw", "avg_featmap", "cls_token"):
        settings = dict(patch_size=8, out_type=out_type)
        stock = randomize(stock_backbones.XCiT(**XCIT, **settings))
        ours = models.SpectralXCiT(XCIT, **settings).eval()
        ours.load_state_dict(stock.state_dict(), strict=True)
        x = torch.randn(1, 3, 32, 32)
        assert all(torch.equal(a, b) for a, b in zip(ours(x), stock(x), strict=True))

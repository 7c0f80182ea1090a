"""Every naming against the code base that has it: load, same function, and strictly back again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmspectral.checkpoints import load_backbone
from mmspectral.checkpoints.names import FAMILIES, detect, from_mmpretrain, naming_of, to_mmpretrain
from mmspectral.checkpoints.names.naming import Template, rename
from mmspectral.checkpoints.names.swin import position_index
from mmspectral.models.backbones import SpectralDaViT, SpectralDeiT, SpectralSwin, SpectralViT, SpectralXCiT

pytest.importorskip("timm")
from timm.models import davit, deit, swin_transformer, vision_transformer, xcit

SIZE = (48, 64)


def shake(model):
    """Move every parameter and statistic off its initial value, so that a mixed-up norm or bias shows."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += 0.05 * torch.rand_like(tensor)
    return model.eval()


def xcit_pair():
    theirs = xcit.Xcit(img_size=SIZE, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5, eta=0.5)
    return theirs, SpectralXCiT(arch=dict(embed_dims=32, depth=2, num_heads=4), patch_size=8), "head"


def swin_pair():
    sizes = dict(depths=(2, 1, 2), num_heads=(1, 2, 4))
    theirs = swin_transformer.SwinTransformer(img_size=(64, 64), embed_dim=16, window_size=4, num_classes=5, **sizes)
    return theirs, SpectralSwin(arch=dict(embed_dims=16, **sizes), window_size=4), "head.fc"


def vit_pair(**kwargs):
    theirs = vision_transformer.VisionTransformer(
        img_size=SIZE, embed_dim=32, depth=2, num_heads=4, num_classes=5, **kwargs
    )
    arch = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=128)
    scale = kwargs.get("init_values") or 0.0
    return theirs, SpectralViT(arch, img_size=SIZE, layer_scale_init_value=scale), "head"


def average_pair():
    theirs, _, head = vit_pair(global_pool="avg")
    arch = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=128)
    return theirs, SpectralViT(arch, img_size=SIZE, out_type="avg_featmap", final_norm=False), head


def layer_scale_pair():
    return vit_pair(init_values=0.1)


def deit_pair():
    theirs = deit.VisionTransformerDistilled(img_size=SIZE, embed_dim=32, depth=2, num_heads=4, num_classes=5)
    arch = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=128)
    return theirs, SpectralDeiT(arch, img_size=SIZE, distillation=True), "head"


def davit_pair():
    theirs = davit.DaVit(depths=(1, 1, 2), embed_dims=(16, 32, 64), num_heads=(1, 2, 4), num_classes=5)
    arch = dict(embed_dims=16, depths=[1, 1, 2], num_heads=[1, 2, 4])
    return theirs, SpectralDaViT(arch, out_indices=(2,), stem_padding=3, gap_before_final_norm=True), "head.fc"


PAIRS = pytest.mark.parametrize(
    "pair",
    [xcit_pair, swin_pair, vit_pair, average_pair, layer_scale_pair, deit_pair, davit_pair],
    ids=lambda p: p.__name__,
)


def logits_of(ours, theirs, head, x):
    """The class scores of our backbone under timm's head."""
    features = ours(x)[0]
    if isinstance(features, tuple):
        return (theirs.head(features[0]) + theirs.head_dist(features[1])) / 2
    features = features.mean((2, 3)) if features.ndim == 4 else features
    layer = theirs.get_submodule(head)
    return F.linear(features, layer.weight, layer.bias)


@PAIRS
def test_timm_loads_computes_the_same_and_returns(pair, tmp_path):
    torch.manual_seed(0)
    theirs, ours, head = pair()
    shake(theirs)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    report = load_backbone(ours, str(tmp_path / "timm.pth"))
    assert report.matched == report.total
    assert report.missing == report.unused == ()
    assert {name.partition(".")[0] for name in report.skipped} == {"head"}
    assert report.naming.startswith("timm ")
    x = torch.randn(2, 3, *((64, 64) if isinstance(ours, SpectralSwin) else SIZE))
    torch.testing.assert_close(logits_of(ours.eval(), theirs, head, x), theirs(x), rtol=1e-4, atol=1e-4)

    family, naming = detect(theirs.state_dict())
    mapped = to_mmpretrain(theirs.state_dict(), naming)
    back = from_mmpretrain(mapped, naming)
    for module in theirs.modules():
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)
    theirs.load_state_dict(back, strict=True)
    torch.testing.assert_close(logits_of(ours, theirs, head, x), theirs(x), rtol=1e-4, atol=1e-4)


def official_form(theirs, family):
    """timm's weights under the names that timm itself converts from, inverted here by hand."""
    state = dict(theirs.state_dict())
    if family == "xcit":
        fused = {}
        for name, tensor in state.items():
            if ".attn.q." in name:
                fused[name.replace(".q.", ".qkv.")] = torch.cat([state[name.replace(".q.", f".{r}.")] for r in "qkv"])
            elif ".attn.k." not in name and ".attn.v." not in name:
                fused[name.replace("pos_embed.", "pos_embeder.")] = tensor
        return fused
    if family == "swin":
        renamed = {}
        for name, tensor in state.items():
            if ".downsample." in name:
                _, stage, rest = name.split(".", 2)
                name = f"layers.{int(stage) - 1}.{rest}"
            renamed[name.replace("head.fc.", "head.")] = tensor
        return renamed
    renamed = {}
    for name, tensor in state.items():
        for theirs_, official in (
            ("cpe1.", "cpe.0."),
            ("cpe2.", "cpe.1."),
            ("head.norm.", "norms."),
            ("head.fc.", "head."),
        ):
            name = name.replace(theirs_, official)
        parts = name.split(".")
        if parts[0] == "stem":
            parts[:1] = ["patch_embeds", "0"]
        elif parts[0] == "stages" and parts[2] == "downsample":
            parts[:3] = ["patch_embeds", parts[1]]
        elif parts[0] == "stages":
            parts[:3] = ["main_blocks", parts[1]]
        if parts[0] == "patch_embeds":
            parts[2] = parts[2].replace("conv", "proj")
        renamed[".".join(parts)] = tensor
    return renamed


@pytest.mark.parametrize(
    ("family", "pair"), [("xcit", xcit_pair), ("swin", swin_pair), ("davit", davit_pair)], ids=["xcit", "swin", "davit"]
)
def test_official_names_are_those_that_timm_converts(family, pair, tmp_path):
    """timm's own filter for official files takes the form made here to timm's names; so the form is right."""
    torch.manual_seed(0)
    theirs, ours, head = pair()
    shake(theirs)
    official = official_form(theirs, family)
    module = {"xcit": xcit, "swin": swin_transformer, "davit": davit}[family]
    filtered = module.checkpoint_filter_fn(dict(official), theirs)
    assert filtered.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, filtered[name]) for name, tensor in theirs.state_dict().items())

    # Microsoft's files also hold buffers that follow from the window.
    buffers = ("layers.0.blocks.0.attn.relative_position_index", "layers.0.blocks.1.attn_mask")
    extra = {name: torch.zeros(16, 16) for name in buffers if family == "swin"}
    torch.save({"model": official | extra}, tmp_path / "official.pth")
    report = load_backbone(ours, str(tmp_path / "official.pth"))
    assert report.matched == report.total and not report.unused
    assert report.naming == f"official {family}"
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(logits_of(ours.eval(), theirs, head, x), theirs(x), rtol=1e-4, atol=1e-4)
    naming = naming_of(FAMILIES[family], "official")
    back = from_mmpretrain(to_mmpretrain(official, naming), naming)
    assert back.keys() == official.keys()
    assert all(torch.equal(tensor, official[name]) for name, tensor in back.items())


def test_layer_scale_of_official_deit(tmp_path):
    torch.manual_seed(0)
    theirs, ours, head = layer_scale_pair()
    shake(theirs)
    state = {
        n.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t for n, t in theirs.state_dict().items()
    }
    torch.save({"model": state}, tmp_path / "deit3.pth")
    report = load_backbone(ours, str(tmp_path / "deit3.pth"))
    assert report.matched == report.total and report.naming == "official vit"
    x = torch.randn(1, 3, *SIZE)
    torch.testing.assert_close(logits_of(ours.eval(), theirs, head, x), theirs(x), rtol=1e-4, atol=1e-4)


def test_mmsegmentation_names(tmp_path):
    """Its ViT holds torch's attention."""
    torch.manual_seed(0)
    source, target = shake(vit_pair()[1]), vit_pair()[1]
    naming = naming_of(FAMILIES["vit"], "mmseg")
    state = from_mmpretrain(source.state_dict(), naming)
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    own = {n.removeprefix("layers.0.attn.attn."): t for n, t in state.items() if n.startswith("layers.0.attn.attn.")}
    attention.load_state_dict(own, strict=True)
    tokens = torch.randn(2, 7, 32)
    torch.testing.assert_close(
        attention(tokens, tokens, tokens)[0], source.layers[0].attn(tokens), rtol=1e-5, atol=1e-5
    )
    torch.save(dict(state_dict={f"backbone.{name}": tensor for name, tensor in state.items()}), tmp_path / "mmseg.pth")
    assert load_backbone(target, str(tmp_path / "mmseg.pth")).naming == "mmseg vit"
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@PAIRS
def test_mmpretrains_own_names_stay(pair):
    _, ours, _ = pair()
    family, naming = detect(ours.state_dict())
    assert naming is None
    for other in family.namings:
        theirs = from_mmpretrain(ours.state_dict(), other)
        again = to_mmpretrain(theirs, other)
        assert detect(again)[1] is None
        derived = {name for name in ours.state_dict() if name.endswith("relative_position_index")}
        assert again.keys() == ours.state_dict().keys() - derived
        assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in again.items())


def test_the_norms_of_a_dense_form_keep_their_names():
    sizes = dict(depths=[1, 1], num_heads=[1, 2])
    dense = SpectralSwin(arch=dict(embed_dims=16, **sizes), window_size=4, out_indices=(0, 1))
    names = from_mmpretrain(dense.state_dict(), naming_of(FAMILIES["swin"], "official"))
    assert {"norm0.weight", "norm1.weight"} <= names.keys()
    assert "norm.weight" not in names


def test_the_index_that_stock_code_stores_is_completed():
    ours = swin_pair()[1]
    state = {name: t for name, t in ours.state_dict().items() if not name.endswith("relative_position_index")}
    completed = FAMILIES["swin"].complete(state)
    assert completed.keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in completed.items())
    assert position_index(torch.zeros(3 * 5, 2)) is None


def test_unknown_names():
    assert detect(["conv1.weight", "layer1.0.bn1.weight"]) is None
    with pytest.raises(ValueError, match="known from official, timm, not from 'mmseg'"):
        naming_of(FAMILIES["xcit"], "mmseg")


def test_templates_compute_with_indices():
    assert Template("a.{i+1}.b").match("a.0.b.c") is None
    assert Template("a.{2i}").match("a.3.b") is None
    assert Template("a.{i}.b").match("a.1.bc") is None
    rules = (("a.{i}.{j}.x", "b.{j}.{2i}"), ("a", "c"))
    assert rename("a.3.4.x.weight", rules) == "b.4.6.weight"
    assert rename("b.4.6.weight", rules, reverse=True) == "a.3.4.x.weight"
    assert rename("a", rules) == "c"
    assert rename("other", rules) == "other"

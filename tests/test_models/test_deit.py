"""SpectralDeiT against mmpretrain's plain and distilled transformers and timm's."""

import copy

import pytest
import torch
from mmpretrain.models.backbones import DistilledVisionTransformer, VisionTransformer

from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.models.backbones.deit import SpectralDeiT

TINY = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=64)
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
DISTILLATION = pytest.mark.parametrize("distillation", [False, True], ids=["plain", "distilled"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(distillation=False, **kwargs):
    return SpectralDeiT(**{"arch": TINY, "img_size": (48, 64), "distillation": distillation, **kwargs})


def randomize(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def total(outputs):
    tensors = [t for out in outputs for t in (out if isinstance(out, tuple) else (out,))]
    return sum(tensor.square().sum() for tensor in tensors)


@pytest.mark.parametrize("size", [(48, 64), (33, 100)])
@pytest.mark.parametrize("kwargs", [dict(), dict(out_type="featmap", out_indices=[0, 2]), dict(out_type="raw")])
@DISTILLATION
def test_conditioning_off_is_bit_equal_to_stock(distillation, kwargs, size):
    stock_class = DistilledVisionTransformer if distillation else VisionTransformer
    stock = randomize(stock_class(TINY, img_size=(48, 64), drop_path_rate=0.3, **copy.deepcopy(kwargs)))
    ours = build(distillation, drop_path_rate=0.3, **kwargs)
    ours.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, *size)
    losses = []
    for model in (stock, ours):
        model.train()
        torch.manual_seed(1)
        outputs = model(x)
        if not kwargs:
            assert isinstance(outputs[0], tuple) == distillation
        losses.append(total(outputs))
        losses[-1].backward()
    assert torch.equal(*losses)
    grads = {name: p.grad for name, p in stock.named_parameters()}
    assert grads.keys() == {name for name, _ in ours.named_parameters()}
    assert all(torch.equal(p.grad, grads[name]) for name, p in ours.named_parameters())


def test_each_form_loads_the_other():
    """198 against 197 rows of the position embedding, with and without the token."""
    plain, distilled = randomize(build(False)), randomize(build(True))
    target = build(False)
    assert target.load_state_dict(distilled.state_dict(), strict=True) == ([], [])
    assert torch.equal(target.pos_embed[:, 0], distilled.pos_embed[:, 0])
    assert torch.equal(target.pos_embed[:, 1:], distilled.pos_embed[:, 2:])

    target = randomize(build(True))
    drawn = {name: p.clone() for name, p in target.named_parameters()}
    missing, unexpected = target.load_state_dict(plain.state_dict(), strict=False)
    assert missing == ["dist_token"] and unexpected == []
    assert torch.equal(target.pos_embed[:, 0], plain.pos_embed[:, 0])
    assert torch.equal(target.pos_embed[:, 1], drawn["pos_embed"][:, 1])
    assert torch.equal(target.pos_embed[:, 2:], plain.pos_embed[:, 1:])
    assert torch.equal(target.dist_token, drawn["dist_token"])

    square = randomize(build(True, img_size=64))  # and another grid at once
    target = build(False, img_size=96)
    target.load_state_dict(dict(square.state_dict()), strict=True)  # a plain dict: no metadata
    assert target.pos_embed.shape == (1, 1 + 36, 32)
    assert torch.equal(target.pos_embed[:, 0], square.pos_embed[:, 0])


def test_distillation_token_is_drawn_placed_and_not_decayed():
    model = SpectralDeiT(dict(TINY, embed_dims=256), img_size=32, distillation=True)
    model.init_weights()
    assert abs(model.dist_token.std() - 0.02) < 0.004
    assert model.get_layer_depth("backbone.dist_token", "backbone.") == (0, 5)
    assert model.no_weight_decay() == {"pos_embed", "cls_token", "dist_token"}
    assert build(False).no_weight_decay() == {"pos_embed", "cls_token"}
    with pytest.raises(ValueError, match="distillation=True needs the class token"):
        build(True, with_cls_token=False, out_type="featmap")


@pytest.mark.parametrize(("arch", "millions"), [("deit-tiny", 5.9), ("deit-small", 22.4), ("deit-base", 87.3)])
def test_distilled_sizes_have_the_published_parameters(arch, millions):
    """Two heads, as published: arXiv 2012.12877 and the DeiT repository say 6, 22 and 87 million."""
    with torch.device("meta"):
        model = SpectralDeiT(arch, distillation=True, conditioning=CONDITIONING)
    with_heads = sum(p.numel() for p in model.parameters()) + 2 * 1000 * (model.embed_dims + 1)
    assert round(with_heads / 1e6, 1) == millions


def test_equals_timm():
    timm_deit = pytest.importorskip("timm.models.deit")
    from mmpretrain.models.heads import DeiTClsHead

    ours = randomize(build(True)).eval()
    head = randomize(DeiTClsHead(num_classes=7, in_channels=32)).eval()
    theirs = timm_deit.VisionTransformerDistilled(
        img_size=(48, 64), embed_dim=32, depth=3, num_heads=4, mlp_ratio=2, num_classes=7
    ).eval()
    state = {**ours.state_dict(), **{f"head.{name}": tensor for name, tensor in head.state_dict().items()}}
    state = from_mmpretrain(state, naming_of(FAMILIES["vit"], "timm"))
    theirs.load_state_dict(state, strict=True)
    x = torch.randn(2, 3, 48, 64)
    torch.testing.assert_close(theirs(x), head(ours(x)), rtol=1e-4, atol=1e-4)

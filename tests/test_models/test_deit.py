"""What SpectralDeiT has beside the promises of every backbone: two forms that load each other."""

import pytest
import torch

from mmspectral.models import SpectralDeiT, SpectralViT

TINY = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=64)


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


def test_plain_deit_is_vit_and_a_distilled_classifier_gives_pairs():
    vit, plain, distilled = randomize(SpectralViT(TINY, img_size=(48, 64))).eval(), build(False).eval(), build(True)
    plain.load_state_dict(vit.state_dict(), strict=True)
    x = torch.randn(2, 3, 33, 100)
    assert torch.equal(plain(x)[0], vit(x)[0])
    assert [part.shape for part in distilled(x)[0]] == [(2, 32)] * 2


def test_each_form_loads_the_other():
    """By load_state_dict; through files: tests/test_checkpoints."""
    plain, distilled = randomize(build(False)), randomize(build(True))
    target = randomize(build(True))
    drawn = target.dist_token.clone()
    assert build(False).load_state_dict(distilled.state_dict(), strict=True) == ([], [])
    assert target.load_state_dict(plain.state_dict(), strict=False) == (["dist_token"], [])
    assert torch.equal(target.dist_token, drawn)
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

"""SpectralXCiT against mmpretrain's XCiT, timm's, and what detection asks of a backbone."""

import copy

import pytest
import torch
from mmpretrain.models.backbones.xcit import XCA
from torch.nn.modules.batchnorm import _BatchNorm

from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.models import SpectralXCA, SpectralXCiT
from mmspectral.models.backbones.xcit import ARCHITECTURES

TINY = dict(embed_dims=32, depth=3, num_heads=4)
CONDITIONING = dict(type="IdentityCorrection", scale=10.0)
BOTH = pytest.mark.parametrize("conditioning", [None, CONDITIONING], ids=["stock", "conditioned"])
SIZES = [(16, 32), (33, 47), (70, 90), (32, 200), (64, 64)]


def build(**kwargs):
    kwargs.setdefault("arch", TINY)
    kwargs.setdefault("patch_size", 8)
    return SpectralXCiT(**kwargs)


def dense(**kwargs):
    kwargs.setdefault("out_indices", (0, 1, 2))
    return build(out_type="featmap", **kwargs)


def forward_backward(model, *size, batch=2):
    outputs = model(torch.randn(batch, 3, *size))
    sum(out.square().mean() for out in outputs).backward()
    return outputs


def test_single_patch_with_batch_norm_is_a_clear_error():
    model = dense().train()
    with pytest.raises(ValueError, match="single 8-pixel patch"):
        model(torch.randn(1, 3, 8, 8))
    assert dense(norm_eval=True).train()(torch.randn(1, 3, 8, 8))[0].isfinite().all()
    assert model.eval()(torch.randn(1, 3, 8, 8))[0].isfinite().all()


def test_train_and_eval_return_self_and_norm_eval_holds():
    model = dense(norm_eval=True)
    assert model.train() is model and model.eval() is model
    model.train()
    assert model.training
    assert not any(m.training for m in model.modules() if isinstance(m, _BatchNorm))


def test_sync_bn_falls_back_on_the_cpu():
    """without a process group; with one: tests/test_engine."""
    model = dense(bn_norm_cfg=dict(type="SyncBN")).train()
    if not torch.cuda.is_available():
        assert not any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())
        assert any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
        forward_backward(model, 32, 32)


def test_names_without_weight_decay_are_those_of_timm():
    xcit = pytest.importorskip("timm.models.xcit")
    theirs = xcit.Xcit(embed_dim=32, depth=1, num_heads=4, patch_size=16)
    names = dict(theirs.named_parameters())
    assert build().no_weight_decay() == {name for name in theirs.no_weight_decay() if name in names} == {"cls_token"}
    assert dense().no_weight_decay() == set()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_published_size_has_the_published_parameters(arch):
    millions = {
        "nano-12": 3,
        "tiny-12": 7,
        "tiny-24": 12,
        "small-12": 26,
        "small-24": 48,
        "medium-24": 84,
        "large-24": 189,
    }
    with torch.device("meta"):
        model = SpectralXCiT(arch=arch, conditioning=CONDITIONING)
    with_head = sum(p.numel() for p in model.parameters()) + 1000 * (model.embed_dims + 1)
    assert round(with_head / 1e6) == millions[arch]


@pytest.mark.parametrize(("arch", "patch_size"), [("nano-12", 16), ("nano-12", 8), ("tiny-12", 16)])
def test_equals_timm(arch, patch_size):
    """timm's model with our weights under its names gives the same class token."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = SpectralXCiT(arch=arch, patch_size=patch_size).eval()
    ours.init_weights()
    theirs = timm.create_model(f"xcit_{arch.replace('-', '_')}_p{patch_size}_224", num_classes=0).eval()
    theirs.load_state_dict(from_mmpretrain(ours.state_dict(), naming_of(FAMILIES["xcit"], "timm")), strict=True)
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(theirs(x), ours(x)[0], rtol=1e-4, atol=1e-4)


def test_attention_layer_is_a_drop_in(adopted):
    torch.manual_seed(0)
    stock = XCA(24, 3, qkv_bias=True)
    ours = SpectralXCA(24, 3, qkv_bias=True)
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(2, 17, 24)
    assert torch.equal(stock(x), ours(x))
    conditioned = adopted(SpectralXCA, stock, CONDITIONING)
    assert conditioned.qkv.weight is stock.qkv.weight
    assert list(conditioned.state_dict()) == list(stock.state_dict())
    copy.deepcopy(conditioned)(x).sum().backward()


def test_attention_logits_do_not_saturate_at_initialisation():
    """XCA normalises q and k, so lambda = 10 leaves its entropy near the maximum."""
    torch.manual_seed(0)
    layer = SpectralXCA(96, 2, qkv_bias=True, conditioning=CONDITIONING)
    torch.nn.init.trunc_normal_(layer.qkv.weight, std=0.02)
    x = torch.nn.functional.layer_norm(torch.randn(1, 400, 96), (96,))
    q, k, _ = layer.qkv(x).reshape(1, 400, 3, 2, 48).permute(2, 0, 3, 4, 1)
    attn = (torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT).softmax(-1)
    entropy = -(attn * attn.log()).sum(-1).mean()
    assert entropy > 0.95 * torch.tensor(48.0).log()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (dict(arch="small"), ValueError, "unknown XCiT arch 'small'; choose nano-12"),
        (dict(out_indices=(7,)), ValueError, "out_indices"),
        (dict(out_type="featmap", out_indices=()), ValueError, "out_indices"),
        (dict(frozen_stages=6), ValueError, r"must lie in \[-1, 5\]"),
        (dict(out_type="featmap", out_indices=(1,), frozen_stages=3), ValueError, r"must lie in \[-1, 2\]"),
        (dict(conditioning=dict(type="IdentityCorrection", size=3)), TypeError, "no argument 'size'"),
        (dict(patchsize=8), TypeError, "patchsize"),
        (dict(patch_size=7, img_size=224), ValueError, "16 or 8"),
    ],
)
def test_errors(kwargs, error, match):
    with pytest.raises(error, match=match):
        build(**kwargs)

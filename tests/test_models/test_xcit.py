"""SpectralXCiT against mmpretrain's XCiT, timm's, and what detection asks of a backbone."""

import copy

import pytest
import torch
from mmpretrain.models.backbones import XCiT
from mmpretrain.models.backbones.xcit import XCA
from torch.nn.modules.batchnorm import _BatchNorm

from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.layers import conditioned_projections, fold, unfold
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("patch_size", [8, 16])
def test_conditioning_off_is_bit_equal_to_stock(patch_size, size):
    torch.manual_seed(0)
    stock = XCiT(**TINY, patch_size=patch_size)
    ours = build(patch_size=patch_size, conditioning=None)
    ours.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, *size)
    for train in (True, False):
        stock.train(train)
        ours.train(train)
        theirs, mine = (m(x)[0] for m in (stock, ours))
        assert torch.equal(theirs, mine)
    theirs.square().sum().backward()
    mine.square().sum().backward()
    grads = {name: p.grad for name, p in stock.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (grads[name] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, grads[name]), name


def test_dense_form_is_bit_equal_to_stock():
    torch.manual_seed(0)
    stock = XCiT(**TINY, patch_size=8, out_type="featmap", out_indices=(0, 1, 2))
    stock.eval()  # returns None in mmpretrain
    ours = dense().eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(1, 3, 40, 56)
    assert all(torch.equal(a, b) for a, b in zip(stock(x), ours(x), strict=True))


def test_conditioning_changes_the_function_and_nothing_else():
    torch.manual_seed(0)
    stock, ours = build().eval(), build(conditioning=CONDITIONING).eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in stock.named_parameters()}
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in stock.named_buffers()]
    x = torch.randn(2, 3, 32, 48)
    assert (ours(x)[0] - stock(x)[0]).norm() > 0.1 * stock(x)[0].norm()
    assert list(conditioned_projections(ours)) == [f"xca_layers.{i}.attn.qkv" for i in range(3)]


def test_fold_and_unfold_keep_the_function():
    ours = dense(conditioning=CONDITIONING).double().eval()
    x = torch.randn(1, 3, 24, 40, dtype=torch.float64)
    before = ours(x)
    sites = fold(ours)
    stock = dense(conditioning=None).double().eval()
    stock.load_state_dict(ours.state_dict(), strict=True)
    unfold(ours, sites)
    for a, b, c in zip(before, stock(x), ours(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-11)


@BOTH
@pytest.mark.parametrize("size", [(8, 8), *SIZES])
@pytest.mark.parametrize("patch_size", [8, 16])
def test_any_size_and_every_parameter_gets_a_gradient(conditioning, size, patch_size):
    """users.md E1 and D4."""
    for indices in ((0, 1, 2), (0, 1), (2,), (1,)):
        model = dense(conditioning=conditioning, patch_size=patch_size, out_indices=indices).train()
        outputs = forward_backward(model, *size)
        expected = [-(-side // patch_size) for side in size]
        assert [list(out.shape) for out in outputs] == [[2, 32, *expected]] * len(indices)
        assert [name for name, p in model.named_parameters() if p.grad is None] == []
    classifier = build(conditioning=conditioning, patch_size=patch_size, class_attention_conditioning=conditioning)
    forward_backward(classifier.train(), *size)
    assert [name for name, p in classifier.named_parameters() if p.grad is None] == []


def test_single_patch_with_batch_norm_is_a_clear_error():
    """users.md E6."""
    model = dense().train()
    with pytest.raises(ValueError, match="single 8-pixel patch"):
        model(torch.randn(1, 3, 8, 8))
    assert dense(norm_eval=True).train()(torch.randn(1, 3, 8, 8))[0].isfinite().all()
    assert model.eval()(torch.randn(1, 3, 8, 8))[0].isfinite().all()


def test_outputs_are_described():
    """users.md B6."""
    model = dense(out_indices=(0, 2))
    outputs = model(torch.randn(2, 3, 64, 96))
    assert len(model.out_indices) == len(outputs) == len(model.out_channels) == len(model.out_strides)
    for out, channels, stride in zip(outputs, model.out_channels, model.out_strides, strict=True):
        assert out.shape[1:] == (channels, 64 // stride, 96 // stride)


def test_classifier_weights_load_into_the_dense_form():
    torch.manual_seed(0)
    classifier = build()
    model = dense(out_indices=(0, 1))
    assert not [name for name in model.state_dict() if name.startswith(("cls_token", "ca_layers", "norm"))]
    missing, unexpected = model.load_state_dict(classifier.state_dict(), strict=True)
    assert missing == unexpected == []
    own = classifier.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
    torch.nn.ModuleDict({"backbone": model}).load_state_dict(
        {f"backbone.{name}": tensor for name, tensor in own.items()}, strict=True
    )


@pytest.mark.parametrize("n", range(-1, 6))
def test_frozen_stages_freeze_the_stem_and_exactly_n_blocks(n):
    """users.md E3."""
    model = build(frozen_stages=n).train().train()
    frozen = {".".join(name.split(".")[:2]) for name, p in model.named_parameters() if not p.requires_grad}
    blocks = [f"xca_layers.{i}" for i in range(3)] + ["ca_layers.0", "ca_layers.1"]
    expected = set(blocks[: max(n, 0)])
    assert {name for name in frozen if "layers" in name} == expected
    assert ("patch_embed.proj" in frozen) == ("pos_embed.token_projection" in frozen) == (n >= 0)
    assert ("cls_token" in frozen) == (n > 3)
    assert ("norm.weight" in frozen) == (n >= 5)
    training = {name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training}
    assert not any(name.startswith(block + ".") for name in training for block in expected)
    assert any(name.startswith("patch_embed") for name in training) == (n < 0)
    with_cut = dense(frozen_stages=2).train()
    forward_backward(with_cut, 32, 32)
    assert {n for n, p in with_cut.named_parameters() if p.grad is None} == {
        n for n, p in with_cut.named_parameters() if n.startswith(("patch_", "pos_", "xca_layers.0", "xca_layers.1"))
    }


@BOTH
def test_checkpointing_gives_the_same_gradients(conditioning):
    """users.md D5; on two ranks: tests/test_engine."""
    torch.manual_seed(0)
    plain = dense(conditioning=conditioning, drop_path_rate=0.5).train()
    recomputed = dense(conditioning=conditioning, drop_path_rate=0.5, with_cp=True).train()
    recomputed.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 40)
    grads = []
    for model in (plain, recomputed):
        torch.manual_seed(1)
        loss = sum(out.square().mean() for out in model(x))
        grads.append(torch.autograd.grad(loss, list(model.parameters())))  # refuses the reentrant form
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert plain.xca_layers[0].local_mp.conv1.bn.num_batches_tracked == 1
    assert recomputed.xca_layers[0].local_mp.conv1.bn.num_batches_tracked == 2  # as the docstring says


@BOTH
def test_compiles_into_one_graph(conditioning):
    model = build(conditioning=conditioning, class_attention_conditioning=conditioning, drop_path_rate=0.2).train()
    x = torch.randn(2, 3, 40, 56)
    outputs = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="eager")):
        torch.manual_seed(1)
        outputs.append(forward(x)[0])
    assert torch.equal(*outputs)


def test_init_statistics():
    torch.manual_seed(0)
    model = build(arch=dict(embed_dims=128, depth=2, num_heads=4), conditioning=CONDITIONING)
    model.init_weights()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert abs(module.weight.std() - 0.02) < 0.002, name
            assert not module.bias.any(), name
    assert abs(model.cls_token.std() - 0.02) < 0.005
    assert (model.xca_layers[0].gamma1 == 1).all()


def test_train_and_eval_return_self_and_norm_eval_holds():
    model = dense(norm_eval=True)
    assert model.train() is model and model.eval() is model
    model.train()
    assert model.training
    assert not any(m.training for m in model.modules() if isinstance(m, _BatchNorm))


def test_sync_bn_falls_back_on_the_cpu():
    """users.md E5, without a process group; with one: tests/test_engine."""
    model = dense(bn_norm_cfg=dict(type="SyncBN")).train()
    if not torch.cuda.is_available():
        assert not any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())
        assert any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
        forward_backward(model, 32, 32)


def test_layer_depth_grows_with_depth_and_covers_every_parameter():
    """users.md E4."""
    model = build()
    depths = {name: model.get_layer_depth(f"backbone.{name}", "backbone.") for name, _ in model.named_parameters()}
    assert {total for _, total in depths.values()} == {3 + 2 + 2}
    assert depths["patch_embed.proj.0.conv.weight"][0] == 0
    assert [depths[f"xca_layers.{i}.gamma1"][0] for i in range(3)] == [1, 2, 3]
    assert [depths[f"ca_layers.{i}.gamma1"][0] for i in range(2)] == [4, 5]
    assert depths["norm.weight"][0] == model.get_layer_depth("head.fc.weight", "backbone.")[0] == 6


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
    """users.md E19: timm's model with our weights under its names gives the same class token."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = SpectralXCiT(arch=arch, patch_size=patch_size).eval()
    ours.init_weights()
    theirs = timm.create_model(f"xcit_{arch.replace('-', '_')}_p{patch_size}_224", num_classes=0).eval()
    theirs.load_state_dict(from_mmpretrain(ours.state_dict(), naming_of(FAMILIES["xcit"], "timm")), strict=True)
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(theirs(x), ours(x)[0], rtol=1e-4, atol=1e-4)


def test_attention_layer_is_a_drop_in():
    torch.manual_seed(0)
    stock = XCA(24, 3, qkv_bias=True)
    ours = SpectralXCA(24, 3, qkv_bias=True)
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(2, 17, 24)
    assert torch.equal(stock(x), ours(x))
    conditioned = SpectralXCA.from_stock(stock, CONDITIONING)
    assert conditioned.qkv.weight is stock.qkv.weight
    assert list(conditioned.state_dict()) == list(stock.state_dict())
    copy.deepcopy(conditioned)(x).sum().backward()


def test_attention_logits_do_not_saturate_at_initialisation():
    """facts.md A4: XCA normalises q and k, so lambda = 10 leaves its entropy near the maximum."""
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

"""DarkViT and DarkDeiT: softmax's names and weights, another kernel, and features that have an owner."""

import copy

import pytest
import torch
from mmpretrain.models.backbones import VisionTransformer
from torch import nn

from mmspectral.checkpoints.load import load_backbone
from mmspectral.checkpoints.names import FAMILIES, detect, from_mmpretrain, naming_of
from mmspectral.layers import feature_kernels
from mmspectral.models import DarkDeiT, DarkMultiheadAttention, DarkViT, SpectralDeiT, SpectralViT

TINY = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64)
DARK = dict(type="dark", num_features=16)
KERNELS = dict(
    dark=DARK,
    layer=dict(DARK, sharing="layer", rank=3),
    model=dict(DARK, sharing="model"),
    reduced=dict(DARK, proposal="sharp", shift="learned"),
    performer=dict(type="performer", num_features=16),
    temperature=dict(type="temperature", num_features=16),
    learned=dict(type="learned", num_features=16),
    constant=dict(type="constant", num_features=16),
    uniform=dict(type="uniform"),
    softmax=dict(type="mmspectral.softmax"),
)
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(kernel=DARK, cls=DarkViT, **kwargs):
    return cls(**(dict(arch=TINY, img_size=(48, 64), kernel=kernel) | kwargs))


def dense(kernel=DARK, **kwargs):
    return build(kernel, **(dict(out_type="featmap", out_indices=(0, 1)) | kwargs))


def images(*size, batch=2):
    return torch.randn(batch, 3, *(size or (48, 64)))


def loss_of(model, x):
    outputs = [part for out in model(x) for part in (out if isinstance(out, tuple) else (out,))]
    return sum(out.square().mean() for out in outputs)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("conditioning", [None, CONDITIONING], ids=["stock", "conditioned"])
@pytest.mark.parametrize("kwargs", [dict(), dict(out_type="featmap", layer_cfgs=dict(attn_drop_rate=0.1))])
def test_without_a_kernel_it_is_the_softmax_backbone_bit_by_bit(kwargs, conditioning):
    models = []
    for cls, own in ((SpectralViT, {}), (DarkViT, dict(kernel=None))):
        torch.manual_seed(0)
        models.append(cls(TINY, img_size=(48, 64), conditioning=conditioning, **own, **copy.deepcopy(kwargs)))
        models[-1].init_weights()
    softmax, ours = models
    assert list(softmax.state_dict()) == list(ours.state_dict())
    x = images(33, 50)
    for train in (False, True):
        outputs = []
        for model in models:
            torch.manual_seed(1)
            outputs.append(model.train(train)(x))
        assert same(*outputs)
    if conditioning is None:
        stock = VisionTransformer(TINY, img_size=(48, 64), **copy.deepcopy(kwargs))
        stock.load_state_dict(ours.state_dict(), strict=True)
        stock.eval()
        assert same(stock(x), ours.eval()(x))


def test_a_kernel_changes_no_other_draw_and_no_other_name():
    models = []
    for kernel in (None, DARK):
        torch.manual_seed(0)
        models.append(build(kernel))
        models[-1].init_weights()
    softmax, dark = (model.state_dict() for model in models)
    assert all(torch.equal(dark[name], tensor) for name, tensor in softmax.items())
    own = {f"layers.{i}.attn.kernel.{part}" for i in range(2) for part in ("M", "w", "redraws")}
    assert set(dark) - set(softmax) == own
    assert list(feature_kernels(models[1])) == [f"layers.{i}.attn.kernel" for i in range(2)]
    assert not torch.equal(dark["layers.0.attn.kernel.w"], dark["layers.1.attn.kernel.w"])


@pytest.mark.parametrize("name", ["dark", "model", "temperature"])
def test_many_features_come_close_to_softmax(name):
    exact, x, errors = build(None).eval(), images(), []
    for m in (16, 256, 4096):
        model = build(KERNELS[name] | dict(num_features=m)).eval()
        model.load_state_dict(exact.state_dict(), strict=False)
        errors.append((model(x)[0] - exact(x)[0]).norm().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("trainable", ["all", "projections"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_trained_parameter_gets_a_gradient(name, trainable):
    forms = (
        dict(),
        dict(out_type="featmap", out_indices=(0, 1), conditioning=CONDITIONING),
        dict(out_type="featmap", out_indices=0),
    )
    for form in forms:
        model = build(KERNELS[name], trainable=trainable, **form).train()
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        everything = {n for n, _ in model.named_parameters()}
        projections = {n for n in everything if ".attn.qkv." in n or ".kernel." in n}
        assert trained == (everything if trainable == "all" else projections)
        loss_of(model, images(20, 37)).backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == trained


def test_constant_values_pass_unchanged():
    """The weights of every query sum to one, whatever the features."""
    attention = build().layers[0].attn
    qkv = attention.qkv
    with torch.no_grad():
        qkv.weight[64:], qkv.bias[64:] = 0, torch.arange(32.0)
    expected = attention.proj(torch.arange(32.0)).expand(2, 13, 32)
    torch.testing.assert_close(attention(torch.randn(2, 13, 32)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("naming", [None, "timm", "official"])
@pytest.mark.parametrize("name", ["dark", "reduced", "learned"])
def test_softmax_checkpoints_load_and_the_report_names_what_is_new(name, naming, tmp_path):
    torch.manual_seed(1)
    source = SpectralViT(TINY, img_size=(48, 64))
    state = source.state_dict()
    if naming:
        state = from_mmpretrain(state, naming_of(FAMILIES["vit"], naming))
    torch.save(dict(state_dict=state), tmp_path / "softmax.pth")
    model = dense(KERNELS[name], out_indices=(1,))
    report = load_backbone(model, str(tmp_path / "softmax.pth"))
    kernels = [n for n in model.state_dict() if ".kernel." in n]
    assert list(report.missing) == kernels and kernels
    assert "not in the file: layers.0.attn.kernel." in str(report)
    assert not report.unused
    assert all(torch.equal(t, source.state_dict()[n]) for n, t in model.state_dict().items() if n not in kernels)


@pytest.mark.parametrize("naming", [None, "timm", "official", "mmseg"])
def test_dark_checkpoints_keep_their_kernels_under_every_naming(naming, tmp_path):
    torch.manual_seed(1)
    source = build()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    for kernel in feature_kernels(source).values():
        kernel.redraw(4)
    state = source.state_dict()
    if naming:
        state = from_mmpretrain(state, naming_of(FAMILIES["vit"], naming))
        assert detect(state)[1].name in (naming, "timm")
    assert detect(source.state_dict()) == (FAMILIES["vit"], None)
    torch.save(state, tmp_path / "dark.pth")
    model = build()
    report = load_backbone(model, str(tmp_path / "dark.pth"))
    assert not report.missing and not report.unused and report.share == 1
    assert all(torch.equal(t, source.state_dict()[n]) for n, t in model.state_dict().items())
    softmax = build(None)
    report = load_backbone(softmax, str(tmp_path / "dark.pth"))
    assert all(".kernel." in n for n in report.unused) and len(report.unused) == 6 and not report.missing


def test_evaluation_is_deterministic_and_only_training_changes_it():
    """redraws change buffers in place, and outputs only once they are called for."""
    model, x = build(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffers = {n: (id(b), b.data_ptr(), b.clone()) for n, b in model.named_buffers()}
    assert same(model.train()(x), model(x))
    first = model.eval()(x)
    assert same(first, model(x))
    assert same(first, model.train()(x)) and same(first, model.eval()(x))
    model.train()
    loss_of(model, x).backward()
    optimizer.step()
    assert all(torch.equal(b, buffers[n][2]) for n, b in model.named_buffers())
    trained = model.eval()(x)
    assert not same(first, trained) and same(trained, model(x))
    for kernel in feature_kernels(model).values():
        kernel.redraw(1)
    assert all((id(b), b.data_ptr()) == buffers[n][:2] for n, b in model.named_buffers())
    assert not same(trained, model(x))
    for kernel in feature_kernels(model).values():
        kernel.redraw(0)
    assert same(trained, model(x))


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["dark", "reduced", "performer", "learned"])
def test_half_precision_and_large_queries_and_keys(name, dtype, size):
    """q and k as large as float16 holds; near float32 where rounding of q and k allows."""
    model = dense(KERNELS[name]).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.qkv.weight[:64] *= size
            layer.attn.qkv.bias[:64] *= size
    x = images()
    expected = model(x)
    with torch.autocast("cpu", dtype):
        outputs = model(x)
        loss_of(model, x).backward()
    cast = copy.deepcopy(model).to(dtype)
    assert all(kernel.w.dtype == torch.float32 for kernel in feature_kernels(cast).values()) == (name != "learned")
    for low in (outputs, cast(x.to(dtype))):
        assert all(torch.isfinite(out).all() for out in low)
        if size == 1:
            assert all((a - b).norm() < 0.03 * b.norm() for a, b in zip(low, expected, strict=True))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.slow
def test_compiles_into_one_graph():
    """two sizes, train and eval, a redraw in between."""
    model = dense(conditioning=CONDITIONING, drop_path_rate=0.3)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for counter, size in enumerate([(48, 64), (32, 80)]):
        for kernel in feature_kernels(model).values():
            kernel.redraw(counter)
        x = images(*size)
        for train in (True, False):
            model.train(train)
            outputs = []
            for forward in (model, compiled):
                torch.manual_seed(1)
                outputs.append(forward(x))
            for a, b in zip(*outputs, strict=True):
                torch.testing.assert_close(a, b)
        loss_of(compiled.train(), x).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_saturation_is_measured_on_the_logits_of_the_kernel():
    arch = dict(TINY, embed_dims=64)
    conditioning = dict(type="IdentityCorrection", scale=10.0)
    with pytest.warns(UserWarning, match="DarkViT with .*attention of layers.0.attn starts"):
        DarkViT(arch, img_size=64, kernel=dict(type="softmax"), conditioning=conditioning)
    attention = build().layers[0].attn
    x = torch.randn(2, 9, 32)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    expected = (attention.attention_logits(x).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x), attention.proj(expected), rtol=1e-4, atol=1e-5)


def test_qk_scale_reaches_the_kernel():
    x = torch.randn(2, 9, 32)
    layers = [DarkMultiheadAttention(32, 4, kernel=DARK, qk_scale=s) for s in (None, 8**-0.5, 0.1)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict(), strict=True)
    first, second, third = (layer(x) for layer in layers)
    assert torch.equal(first, second) and not torch.allclose(first, third)


@pytest.mark.parametrize("name", ["dark", "model"])
def test_frozen_stages_hold_in_both_regimes(name):
    for trainable in ("all", "projections"):
        model = build(KERNELS[name], frozen_stages=1, trainable=trainable)
        for _ in range(2):
            model.train()
            trained = {n for n, p in model.named_parameters() if p.requires_grad}
            assert not any(n.startswith(("layers.0.", "patch_embed", "pos_embed")) for n in trained)
            assert ("layers.1.attn.kernel.M" in trained) == (name == "dark")  # a shared M belongs to block 0
            assert ("layers.1.ln1.weight" in trained) == (trainable == "all")


@pytest.mark.parametrize("distillation", [False, True])
def test_deit(distillation, tmp_path):
    torch.manual_seed(1)
    source = SpectralDeiT(TINY, img_size=(48, 64), distillation=distillation)
    torch.save(source.state_dict(), tmp_path / "deit.pth")
    kwargs = dict(cls=DarkDeiT, distillation=distillation, trainable="projections")
    twin, model = build(None, **kwargs).eval(), build(**kwargs).train()
    for backbone in (twin, model):
        load_backbone(backbone, str(tmp_path / "deit.pth"))
    x = images()
    outputs = [out if distillation else (out,) for out in (source.eval()(x)[0], twin(x)[0], model(x)[0])]
    assert same(outputs[0], outputs[1]) and not same(outputs[0], outputs[2])
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if ".qkv." in n or ".kernel." in n}


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (dict(trainable="none"), ValueError, "trainable must be one of 'all', 'projections', got 'none'"),
        (dict(kernel=dict(type="softmx")), KeyError, "unknown kernel type 'softmx'"),
        (dict(kernel="dark"), TypeError, "kernel must be None or a dict"),
        (dict(kernel=dict(DARK, rank=9)), ValueError, r"rank must be an integer in \[1, 8\]"),
        (
            dict(layer_cfgs=dict(attn_drop_rate=0.1)),
            ValueError,
            "at rate 0.1 needs .* matrix.*drop_path_rate",
        ),
    ],
)
def test_errors(kwargs, error, match):
    with pytest.raises(error, match=match):
        build(**kwargs)
    with pytest.raises(TypeError, match="kernel"):
        DarkViT(TINY, img_size=48)


def test_wide_heads_may_have_a_rank_above_64():
    arch = dict(TINY, embed_dims=96, num_heads=1)
    assert DarkViT(arch, img_size=32, kernel=dict(DARK, rank=80)).layers[0].attn.kernel.M.shape == (1, 80, 96)

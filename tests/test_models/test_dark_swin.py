"""DarkSwin: Swin's names and weights, attention over whole maps, position by convolutions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmspectral.checkpoints.load import load_backbone
from mmspectral.checkpoints.names import FAMILIES, detect, from_mmpretrain, naming_of
from mmspectral.layers import feature_kernels
from mmspectral.models import DarkSwin, SpectralSwin

TINY = dict(embed_dims=16, depths=[2, 1, 1], num_heads=[2, 4, 8])
DARK = dict(type="dark", num_features=16)
KERNELS = dict(
    dark=DARK,
    model=dict(DARK, sharing="model"),
    reduced=dict(DARK, proposal="sharp", shift="learned"),
    performer=dict(type="performer", num_features=16),
    temperature=dict(type="temperature", num_features=16),
    learned=dict(type="learned", num_features=16),
    constant=dict(type="constant", num_features=16),
    uniform=dict(type="uniform"),
    softmax=None,
)
CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
TABLES = ("relative_position_bias_table", "relative_position_index")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(kernel=DARK, **kwargs):
    return DarkSwin(**(dict(arch=TINY, kernel=kernel, window_size=4) | kwargs))


def dense(kernel=DARK, **kwargs):
    return build(kernel, **(dict(out_indices=(0, 1, 2)) | kwargs))


def images(*size, batch=2):
    return torch.randn(batch, 3, *(size or (40, 56)))


def loss_of(model, x):
    return sum(out.square().mean() for out in model(x))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def randomize(model):
    """Put position convolutions and biases away from zero, where mix-ups would not show."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def reference(model, x):
    """Stock parts around an explicit softmax over the whole map."""
    x, (H, W) = model.patch_embed(x)
    outputs = []
    for i, stage in enumerate(model.stages):
        for block in stage.blocks:
            conv = block.cpe.proj
            image = x.transpose(1, 2).unflatten(2, (H, W))
            moved = F.conv2d(image, conv.weight, conv.bias, padding=1, groups=len(image[0]))
            x = x + moved.flatten(2).transpose(1, 2)
            attention = block.attn.w_msa
            q, k, v = attention.qkv(block.norm1(x)).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            x = x + attention.proj((weights @ v).transpose(1, 2).flatten(2))
            x = block.ffn(block.norm2(x), identity=x)
        outputs.append(getattr(model, f"norm{i}")(x).transpose(1, 2).unflatten(2, (H, W)))
        if stage.downsample is not None:
            x, (H, W) = stage.downsample(x, (H, W))
    return outputs


@pytest.mark.parametrize("size", [(40, 56), (5, 70), (33, 33)])
def test_without_a_kernel_it_is_softmax_over_the_whole_map(size):
    model = randomize(dense(None)).double().eval()
    x = images(*size).double()
    for ours, explicit in zip(model(x), reference(model, x), strict=True):
        torch.testing.assert_close(ours, explicit, rtol=1e-11, atol=1e-11)


def test_one_window_without_position_bias_is_swin():
    arch = dict(embed_dims=16, depths=[2], num_heads=[2])
    swin, dark = SpectralSwin(arch, window_size=6).eval(), DarkSwin(arch, kernel=None).eval()
    for block in swin.stages[0].blocks:
        nn.init.zeros_(block.attn.w_msa.relative_position_bias_table)
    left = dark.load_state_dict(swin.state_dict(), strict=False)
    assert not left.unexpected_keys and all(".cpe.proj." in name for name in left.missing_keys)
    x = images(24, 24)
    torch.testing.assert_close(dark(x)[0], swin(x)[0])


def test_position_convolutions_start_as_nothing_and_tell_positions_apart():
    model = build(dict(type="softmax"), arch=dict(embed_dims=16, depths=[2], num_heads=[2])).eval()
    model.init_weights()
    x = torch.randn(1, 3, 16, 16)
    shuffled = x.unflatten(2, (4, 4)).unflatten(4, (4, 4))[:, :, torch.tensor([2, 0, 3, 1])].flatten(4).flatten(2, 3)
    before = model(x)[0]
    assert all(not p.any() for n, p in model.named_parameters() if ".cpe." in n)
    torch.testing.assert_close(model(shuffled)[0], before[:, :, [2, 0, 3, 1]], rtol=1e-4, atol=1e-5)
    nn.init.normal_(model.stages[0].blocks[0].cpe.proj.weight)
    assert not torch.allclose(model(shuffled)[0], model(x)[0][:, :, [2, 0, 3, 1]], atol=0.01)


@pytest.mark.parametrize("trainable", ["all", "projections"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_trained_parameter_gets_a_gradient(name, trainable):
    """for classification, and for detection with conditioning."""
    for form in (dict(), dict(out_indices=(0, 1, 2), conditioning=CONDITIONING), dict(out_indices=(1,))):
        model = build(KERNELS[name], trainable=trainable, **form).train()
        everything = {n for n, _ in model.named_parameters()}
        limited = {n for n in everything if any(part in n for part in (".w_msa.qkv.", ".kernel.", ".cpe."))}
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained == (everything if trainable == "all" else limited)
        loss_of(model, images()).backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
        assert all(p.grad.any() for n, p in model.named_parameters() if ".cpe.proj.weight" in n)


@pytest.mark.parametrize("naming", [None, "timm", "official"])
def test_swin_checkpoints_load_and_the_report_names_what_is_new_and_left(naming, tmp_path):
    torch.manual_seed(1)
    source = SpectralSwin(TINY, window_size=4)
    state = source.state_dict()
    if naming:
        state = from_mmpretrain(state, naming_of(FAMILIES["swin"], naming))
    torch.save(dict(model=state), tmp_path / "swin.pth")
    for kernel in (DARK, None):
        model = build(kernel)
        report = load_backbone(model, str(tmp_path / "swin.pth"))
        new = [n for n in model.state_dict() if ".kernel." in n or ".cpe." in n]
        assert list(report.missing) == new and new
        tables = {n for n in source.state_dict() if n.endswith(TABLES[0])}
        assert set(report.unused) == tables and not report.resized
        assert "in the file but not used: stages.0.blocks.0.attn.w_msa.relative_position_bias_table" in str(report)
        own = source.state_dict()
        assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items() if n not in new)


def test_tables_are_left_out_at_any_depth_of_the_model():
    dark = nn.ModuleDict({"backbone": build()})
    state = nn.ModuleDict({"backbone": SpectralSwin(TINY, window_size=4)}).state_dict()
    left = dark.load_state_dict(state, strict=False)
    assert not left.unexpected_keys and not [n for n in left.missing_keys if ".kernel." not in n and ".cpe." not in n]
    assert not [n for n in dark.state_dict() if n.endswith(TABLES)]
    with pytest.raises(RuntimeError, match="stages.0.surplus"):
        dark.load_state_dict(dark.state_dict() | {"backbone.stages.0.surplus": torch.zeros(1)}, strict=True)


def test_dark_checkpoints_load_completely_and_into_smaller_forms(tmp_path):
    """mong it: before any forward."""
    source = randomize(dense(KERNELS["reduced"]))
    for kernel in feature_kernels(source).values():
        kernel.redraw(3)
    assert detect(source.state_dict()) == (FAMILIES["swin"], None)
    torch.save(source.state_dict(), tmp_path / "dark.pth")
    fresh = dense(dict(KERNELS["reduced"], seed=5))
    fresh.load_state_dict(torch.load(tmp_path / "dark.pth", weights_only=True), strict=True)
    early = build(KERNELS["reduced"], out_indices=(1,))
    early.load_state_dict(source.state_dict(), strict=True)
    x = images()
    expected = source.eval()(x)
    assert same(fresh.eval()(x), expected) and torch.equal(early.eval()(x)[0], expected[1])
    report = load_backbone(dense(KERNELS["reduced"]), str(tmp_path / "dark.pth"))
    assert report.share == 1 and not report.missing and not report.unused


def test_every_layer_has_draws_of_its_own_and_one_geometry_if_asked():
    model = build()
    draws = [kernel.w for kernel in feature_kernels(model).values()]
    assert len(draws) == 4 and [kernel.layer for kernel in feature_kernels(model).values()] == [0, 1, 2, 3]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    shared = build(KERNELS["model"])
    assert len({id(kernel.M) for kernel in feature_kernels(shared).values()}) == 1
    with pytest.raises(ValueError, match="one shape of M in all layers"):
        build(KERNELS["model"], arch=dict(TINY, num_heads=[2, 2, 2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["dark", "reduced", "learned"])
def test_half_precision(name, dtype):
    """with q and k a thousand times larger as well."""
    for size in (1.0, 1e3):
        model = dense(KERNELS[name]).eval()
        for block in (block for stage in model.stages for block in stage.blocks):
            block.attn.w_msa.qkv.weight.data[: -len(block.attn.w_msa.proj.weight)] *= size
        x = images()
        expected = model(x)
        with torch.autocast("cpu", dtype):
            outputs = model(x)
        for low in (outputs, copy.deepcopy(model).to(dtype)(x.to(dtype))):
            assert all(torch.isfinite(out).all() for out in low)
            assert size > 1 or all((a - b).norm() < 0.03 * b.norm() for a, b in zip(low, expected, strict=True))


@pytest.mark.slow
def test_compiles_into_one_graph():
    arch = dict(embed_dims=16, depths=[1, 1], num_heads=[2, 4])  # more takes minutes
    model = randomize(dense(arch=arch, out_indices=(0, 1), conditioning=CONDITIONING, drop_path_rate=0.3))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for counter, size in enumerate([(40, 56), (33, 64)]):
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


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (dict(trainable=None), ValueError, "trainable must be one of 'all', 'projections', got None"),
        (dict(kernel=dict(type="window")), KeyError, "unknown kernel type 'window'"),
        (
            dict(stage_cfgs=dict(block_cfgs=dict(attn_cfgs=dict(attn_drop=0.2)))),
            ValueError,
            r"at rate 0.2 needs an attention matrix.*\(Swin: attn_drop\)",
        ),
        (dict(arch="huge"), ValueError, "unknown Swin arch 'huge'"),
    ],
)
def test_errors(kwargs, error, match):
    with pytest.raises(error, match=match):
        build(**kwargs)

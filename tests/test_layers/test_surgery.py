"""Conditioning, folding, unfolding any model: the function is that of W + C however attention reaches its weights."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import mmspectral
from mmspectral.layers import (
    ConditionedLinear,
    IdentityCorrection,
    QKNorm,
    SpectralNorm,
    SVDCorrection,
    refresh_corrections,
)
from mmspectral.layers.surgery import FOLDED
from mmspectral.ops.conditioning import reference

CONDITIONING = dict(type="IdentityCorrection", scale=2.0)


class Caller(nn.Module):
    """Calls its projection, as timm's ViT does."""

    def __init__(self, dim=12, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        nn.init.normal_(self.qkv.weight, std=0.1)

    def forward(self, x):
        return self.attend(self.qkv(x))

    def attend(self, qkv):
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Reader(Caller):
    """Multiplies by the weight itself, as torchvision's Swin does."""

    def forward(self, x):
        return self.attend(F.linear(x, self.qkv.weight, self.qkv.bias))


class Both(Caller):
    """Multiplies by the weight or calls the projection, as timm's BEiT does."""

    separate = False

    def forward(self, x):
        return self.attend(self.qkv(x) if self.separate else F.linear(x, self.qkv.weight, bias=self.qkv.bias))


class Aliasing(Caller):
    """Does not say ``self``, and multiplies by hand."""

    def forward(s, x):
        projection = s.qkv
        return s.attend(x @ projection.weight.t() + projection.bias)


class Recomputing(Caller):
    """Reads the weight in a part that activation checkpointing runs again in the backward pass."""

    reentrant = False

    def forward(self, x):
        return checkpoint(self.core, x, use_reentrant=self.reentrant)

    def core(self, x):
        return self.attend(F.linear(x, self.qkv.weight, self.qkv.bias))


class ReentrantlyRecomputing(Recomputing):
    reentrant = True


CONDITIONINGS = [
    dict(type="IdentityCorrection", scale=7.0),
    dict(type="IdentityCorrection", scale=7.0, scope="head"),
    dict(type="IdentityCorrection", scale=dict(q=7.0, v=2.0), preserve_norm=0.2),
    dict(type="SVDCorrection"),
    dict(type="SVDCorrection", interval=5, targets=["q", "v"]),
    dict(type="PolarCorrection", scope="head"),
]


def write_w_plus_c(linear, num_heads, row_order="[3][heads][d]", scope="full", scale=2.0):
    C = reference.identity_matrix(*linear.weight.shape, [scale] * 3, num_heads, row_order, scope)
    with torch.no_grad():
        linear.weight.add_(C)


def pair(attention, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(attention(), attention()).double()
    expected = copy.deepcopy(model)
    for layer in expected:
        write_w_plus_c(layer.qkv, layer.num_heads, **settings)
    return model, expected, torch.randn(2, 5, 12).double()


@pytest.mark.parametrize("attention", [Caller, Reader, Both, Aliasing, Recomputing, ReentrantlyRecomputing])
@pytest.mark.parametrize("scope", ["full", "head"])
def test_computes_with_w_plus_c(attention, scope):
    model, expected, x = pair(attention, scope=scope)
    x.requires_grad_()
    parameters, names = list(model.parameters()), list(model.state_dict())
    assert mmspectral.condition(model, dict(CONDITIONING, scope=scope)) is model
    torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for m in (model, expected):
        m(x).sin().sum().backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


def test_without_conditioning_nothing_is_done():
    model = nn.Sequential(Caller())
    assert mmspectral.condition(model, None) is model
    assert type(model[0].qkv) is nn.Linear
    with pytest.raises(TypeError, match=r"mmspectral\.sites"):
        mmspectral.condition(model, CONDITIONING, dry_run=True)


def test_preserve_function_subtracts_c_from_the_weights_that_are_there():
    for attention in (Caller, Reader):
        model, _, x = pair(attention)
        model.append(Last(nn.MultiheadAttention(12, 3, batch_first=True).double()))
        before, weight = model(x), model[0].qkv.weight.detach().clone()
        mmspectral.condition(model, dict(CONDITIONING, preserve_function=True))
        torch.testing.assert_close(model(x), before, rtol=1e-11, atol=1e-11)
        assert not torch.allclose(model[0].qkv.weight, weight)


class Last(nn.Module):
    """Attention of tokens to themselves, without the weights that torch returns beside it."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_a_reader_that_also_calls_gets_the_correction_once():
    model, expected, x = pair(Both)
    mmspectral.condition(model, CONDITIONING)
    for layer in model:
        layer.separate = True
    torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)


def test_w_plus_c_is_computed_once_in_a_forward_pass(monkeypatch):
    class Twice(Caller):
        def forward(self, x):
            y = F.linear(x, self.qkv.weight, self.qkv.bias) + F.linear(x, self.qkv.weight, self.qkv.bias)
            return self.attend(y + self.qkv(x))

    model = mmspectral.condition(nn.Sequential(Twice()), CONDITIONING)
    made = []
    original = IdentityCorrection.corrected
    monkeypatch.setattr(IdentityCorrection, "corrected", lambda *args: made.append(1) or original(*args))
    for _ in range(2):
        model(torch.randn(2, 5, 12)).sum().backward()
    assert len(made) == 2


class Adapted(nn.Module):
    """A low-rank adapter around a projection, as PEFT libraries put there."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 36, bias=False)

    @property
    def weight(self):
        return self.base.weight + self.up.weight @ self.down.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("attention", [Caller, Reader])
def test_an_adapter_on_top_of_a_conditioned_projection(attention):
    model, expected, x = pair(attention)
    mmspectral.condition(model, CONDITIONING)
    for m in (model, expected):
        torch.manual_seed(1)
        m[0].qkv = Adapted(m[0].qkv).double()
    torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", CONDITIONINGS, ids=repr)
@pytest.mark.parametrize("attention", [Caller, Reader])
def test_fold_leaves_stock_modules_and_unfold_undoes_it(attention, settings):
    model, _, x = pair(attention)
    weights = copy.deepcopy(model.state_dict())
    mmspectral.condition(model, settings)
    refresh_corrections(model, updates=0)
    before = model(x)
    assert mmspectral.fold(model) is model
    assert all(type(layer.qkv) is nn.Linear for layer in model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
    assert list(model.state_dict()) == list(weights)
    torch.testing.assert_close(model(x), before, rtol=1e-11, atol=1e-11)
    for remembered in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert mmspectral.unfold(remembered) is remembered
        torch.testing.assert_close(remembered(x), before, rtol=1e-11, atol=1e-11)
        for name, tensor in weights.items():
            torch.testing.assert_close(remembered.state_dict()[name], tensor, rtol=0, atol=1e-12)
        if attention is Reader:
            nn.init.zeros_(remembered[0].qkv.weight)
            assert not torch.allclose(remembered(x), before)


def test_folding_without_a_trace_and_unfolding_by_settings():
    model, expected, x = pair(Reader)
    mmspectral.fold(mmspectral.condition(model, CONDITIONING), keep=False)
    assert not any(FOLDED in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="keep=False"):
        mmspectral.unfold(model)
    mmspectral.unfold(model, CONDITIONING)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)
    C = reference.identity_matrix(36, 12, [2.0] * 3, 3, "[3][heads][d]", "full")
    torch.testing.assert_close(model[0].qkv.weight + C, expected[0].qkv.weight, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="no correction"):
        mmspectral.unfold(expected, dict(type="SpectralNorm"))
    with pytest.raises(ValueError, match="no W was found"):
        mmspectral.unfold(stock := nn.Sequential(Caller()), dict(type="SVDCorrection"))
    assert all(type(layer.qkv) is nn.Linear for layer in (*expected, *stock)), "an error leaves the model as it was"


def test_a_folded_model_needs_nothing_of_ours(tmp_path):
    model = nn.Sequential(nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)).eval()
    mmspectral.fold(mmspectral.condition(model, CONDITIONING))
    torch.save(model, tmp_path / "model.pth")
    code = (
        "import sys, torch; sys.modules['mmspectral'] = None; "
        f"torch.load({str(tmp_path / 'model.pth')!r}, weights_only=False)(torch.zeros(1, 2, 12))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fold_takes_whatever_can_be_folded_and_leaves_the_model_when_one_cannot():
    class Doubled(nn.Linear):
        def folded(self):
            linear = nn.Linear(self.in_features, self.out_features)
            linear.load_state_dict({name: 2 * tensor for name, tensor in self.state_dict().items()})
            return linear

    class Unfoldable(nn.Linear):
        def folded(self):
            raise ValueError("cannot be folded")

    model = mmspectral.condition(nn.Sequential(Caller(), Doubled(12, 12), Unfoldable(2, 2)), CONDITIONING)
    with pytest.raises(ValueError, match="cannot be folded"):
        mmspectral.fold(model)
    assert isinstance(model[0].qkv, ConditionedLinear) and isinstance(model[1], Doubled)
    x, (_, other, _) = torch.randn(2, 12), model
    expected = 2 * other(x)
    del model[2]
    torch.testing.assert_close(mmspectral.fold(model)[1](x), expected)
    with pytest.raises(ValueError, match="folded"):
        mmspectral.fold(mmspectral.condition(nn.Sequential(Caller()), CONDITIONING)[0].qkv)


def test_low_precision_folds_with_a_warning():
    model = mmspectral.condition(nn.Sequential(Caller()).bfloat16(), CONDITIONING)
    x = torch.randn(2, 5, 12).bfloat16()
    before = model(x)
    with pytest.warns(UserWarning, match="bfloat16"):
        mmspectral.fold(model)
    assert torch.equal(model(x), before)


def test_weights_are_read_as_w_plus_c_only_while_the_layer_runs():
    """Initialisers, optimizers, averages and reports see the parameter W."""
    model, _, x = pair(Reader)
    mmspectral.condition(model, CONDITIONING)
    model(x)
    assert model[0].qkv.weight is dict(model.named_parameters())["0.qkv.weight"]
    average = AveragedModel(model)
    nn.init.zeros_(model[0].qkv.weight)
    average.update_parameters(model)
    average.update_parameters(model)
    torch.testing.assert_close(average.module[0].qkv.weight, model[0].qkv.weight)
    C = reference.identity_matrix(36, 12, [2.0] * 3, 3, "[3][heads][d]", "full")
    torch.testing.assert_close(model[0].qkv.effective_weight(), C)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 11).double())
    assert isinstance(model[0].qkv.weight, nn.Parameter), "an error in the forward pass left W + C behind"


@pytest.mark.parametrize("settings", [QKNorm(), SpectralNorm()])
def test_what_no_weight_can_show_is_refused_by_name_when_it_is_read(settings):
    model = mmspectral.condition(nn.Sequential(Reader()), settings)
    with pytest.raises(TypeError, match=r"0\.qkv: its attention layer computes with weight"):
        model(torch.randn(2, 5, 12))
    mmspectral.condition(nn.Sequential(Caller()), settings)(torch.randn(2, 5, 12))


@pytest.mark.parametrize("settings", [QKNorm(), SVDCorrection(interval=5)])
def test_multihead_attention_takes_corrections_without_state_only(settings):
    model = nn.Sequential(nn.MultiheadAttention(12, 3))
    with pytest.raises(ValueError, match="never calls"):
        mmspectral.condition(model, settings)
    assert type(model[0]) is nn.MultiheadAttention


def test_a_reader_of_packed_weights():
    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 3)

        def forward(self, x):
            return F.linear(x, self.attn.in_proj_weight, self.attn.in_proj_bias)

    model, x = Pooling(), torch.randn(5, 12)
    C = reference.identity_matrix(36, 12, [2.0] * 3, 3, "[3][heads][d]", "full").float()
    expected = F.linear(x, model.attn.in_proj_weight + C, model.attn.in_proj_bias)
    mmspectral.condition(model, CONDITIONING)
    torch.testing.assert_close(model(x), expected)
    assert isinstance(model.attn.in_proj_weight, nn.Parameter)


def test_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(Caller(), Caller(dim=12, num_heads=5))
    with pytest.raises(ValueError, match=r"1\.qkv"):
        mmspectral.condition(model, CONDITIONING)
    assert all(type(layer.qkv) is nn.Linear for layer in model)


def test_shared_layers_projections_and_weights_are_conditioned_once_and_stay_shared():
    model, expected, x = pair(Caller)
    third = Caller().double()
    for m in (model, expected):
        m.extend([m[0], copy.deepcopy(third), copy.deepcopy(third)])
        m[3].qkv = m[1].qkv  # a projection of two layers
        m[4].qkv.weight = m[0].qkv.weight  # a weight of two projections
    unchanged = model(x)
    before = expected(x)
    mmspectral.condition(model, CONDITIONING)
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-11)
    assert model[3].qkv is model[1].qkv and isinstance(model[3].qkv, ConditionedLinear)
    mmspectral.fold(model)
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-11)
    assert model[3].qkv is model[1].qkv and model[4].qkv.weight is model[0].qkv.weight
    mmspectral.unfold(model)
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-11)
    mmspectral.fold(model, keep=False)
    mmspectral.condition(model, dict(CONDITIONING, preserve_function=True))
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-11)
    assert not torch.allclose(before, unchanged)


def test_interleaved_rows():
    """Rows [heads][3][d], as in GPT-NeoX and timm's MaxxViT."""

    class NeoX(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_attention_heads = 3
            self.query_key_value = nn.Linear(12, 36)

        def forward(self, x):
            q, k, v = self.query_key_value(x).unflatten(-1, (3, -1)).chunk(3, dim=-1)
            return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))

    for scope in ("full", "head"):
        model = NeoX().double()
        expected = copy.deepcopy(model)
        write_w_plus_c(expected.query_key_value, 3, "[heads][3][d]", scope)
        mmspectral.condition(model, dict(CONDITIONING, scope=scope), layout=dict(row_order="[heads][3][d]"))
        x = torch.randn(2, 5, 12).double()
        torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)


def perturbed(model):
    """Move zero-initialised gammas and heads off zero, so that attention reaches the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def timm(name, **kwargs):
    return pytest.importorskip("timm").create_model(name, num_classes=3, **kwargs)


def torchvision_swin(version=""):
    """Its attention multiplies by ``self.qkv.weight``: a replaced projection is never called."""
    models = pytest.importorskip("torchvision.models.swin_transformer")
    block = getattr(models, f"SwinTransformerBlock{version}")
    return models.SwinTransformer([4, 4], 24, [1, 1], [2, 2], [2, 2], num_classes=3, block=block)


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)[0]


def mmpretrain(name, **kwargs):
    """Swin V2 and BEiT multiply by self.qkv.weight."""
    return First(getattr(pytest.importorskip("mmpretrain.models.backbones"), name)(img_size=32, **kwargs))


def transformers(name, **kwargs):
    library = pytest.importorskip("transformers")
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48) | kwargs
    return First(getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(**sizes)))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


SWIN2 = dict(arch=dict(embed_dims=24, depths=[1, 1], num_heads=[2, 2], extra_norm_every_n_blocks=0))
SWIN2 |= dict(window_size=[4, 4], pad_small_map=True, out_indices=(1,))
BEIT = dict(embed_dims=24, num_layers=2, num_heads=2, feedforward_channels=48)
SWINV2 = dict(img_size=32, window_size=2, embed_dim=24, num_heads=(1, 2), depths=(1, 1))
INTERLEAVED = dict(layout=dict(row_order="[heads][3][d]"))


@pytest.mark.parametrize(
    ("make", "num_sites", "size", "options"),
    [
        (lambda: timm("vit_tiny_patch16_224", img_size=32, depth=2), 2, 32, {}),
        (lambda: timm("beit_base_patch16_224", img_size=32, embed_dim=48, num_heads=3, depth=2), 2, 32, {}),
        (lambda: timm("swinv2_tiny_window8_256", **SWINV2), 2, 32, {}),
        (lambda: timm("xcit_nano_12_p16_224", depth=2), 8, 32, {}),
        slow(lambda: timm("pvt_v2_b0"), 16, 32, {}),
        slow(lambda: timm("convit_tiny", img_size=32), 22, 32, {}),
        slow(lambda: timm("maxvit_rmlp_pico_rw_256", img_size=64), 22, 64, {}),
        (lambda: torchvision_swin(), 2, 16, {}),
        (lambda: torchvision_swin("V2"), 2, 16, {}),
        (lambda: pytest.importorskip("torchvision.models").VisionTransformer(32, 16, 2, 4, 32, 64), 2, 32, {}),
        (lambda: mmpretrain("SwinTransformerV2", **SWIN2), 2, 32, {}),
        (lambda: mmpretrain("BEiTViT", arch=BEIT), 2, 32, {}),
        (lambda: transformers("ViT", image_size=32, patch_size=16), 6, 32, {}),
        (lambda: transformers("Bert", vocab_size=50), 6, None, {}),
        (lambda: transformers("Llama", vocab_size=50, num_attention_heads=4, num_key_value_heads=2), 6, None, {}),
        (lambda: transformers("GPTNeoX", vocab_size=50), 2, None, INTERLEAVED),
    ],
)
def test_models_of_others(make, num_sites, size, options):
    """Against the stock model with W + C written into its weights by hand."""
    torch.manual_seed(0)
    model = perturbed(make())
    x = torch.randint(0, 50, (2, 7)) if size is None else torch.randn(1, 3, size, size)
    expected = copy.deepcopy(model)
    found = mmspectral.sites(model, **options)
    assert len(found) == num_sites
    for site in found:
        module = expected.get_submodule(site.name)
        weight = module.in_proj_weight if isinstance(module, nn.MultiheadAttention) else module.weight
        rows = site.layout
        C = reference.identity_matrix(*weight.shape, [2.0] * len(rows.roles), rows.num_heads, rows.row_order, "full")
        with torch.no_grad():
            weight.add_(C)
    mmspectral.condition(model, CONDITIONING, **options)
    with torch.no_grad():
        ours = model(x)
        torch.testing.assert_close(ours, expected(x), rtol=1e-3, atol=1e-3)
        assert list(model.state_dict()) == list(expected.state_dict())
        torch.testing.assert_close(mmspectral.fold(model)(x), ours, rtol=1e-3, atol=1e-3)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-6)
        torch.testing.assert_close(mmspectral.unfold(model)(x), ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("version", ["", "V2"])
def test_extracted_features_of_torchvision_follow_the_weights(version):
    extract = pytest.importorskip("torchvision.models.feature_extraction").create_feature_extractor
    model, x = mmspectral.condition(perturbed(torchvision_swin(version)), CONDITIONING), torch.randn(1, 3, 16, 16)
    features = extract(model, ["flatten"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(model.head(features(x)["flatten"]), model(x))

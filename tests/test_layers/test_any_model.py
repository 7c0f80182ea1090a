"""Conditioning models of others: the function is that of W + C however their attention reaches the weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mmspectral.layers.weight_readers import WeightReadLinear
from torch import nn

import mmspectral
from mmspectral.layers import ConditionedLinear, IdentityCorrection
from mmspectral.layers.alternatives import QKNorm
from mmspectral.layers.corrections import SVDCorrection
from mmspectral.layers.sites import find_sites
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
    def forward(self, x):
        projection = self.qkv
        return self.attend(x @ projection.weight.t() + projection.bias)


ATTENTIONS = pytest.mark.parametrize("attention", [Caller, Reader, Both, Aliasing])


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


@ATTENTIONS
@pytest.mark.parametrize("scope", ["full", "head"])
def test_computes_with_w_plus_c(attention, scope):
    model, expected, x = pair(attention, scope=scope)
    parameters, names = list(model.parameters()), list(model.state_dict())
    mmspectral.condition(model, dict(CONDITIONING, scope=scope))
    torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for m in (model, expected):
        m(x).sin().sum().backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


def test_preserve_function_takes_c_off_the_weights_that_are_there():
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


@ATTENTIONS
def test_fold_leaves_stock_modules_and_unfold_undoes_it(attention):
    model, expected, x = pair(attention)
    weights = copy.deepcopy(model.state_dict())
    found = mmspectral.condition(model, CONDITIONING)
    sites = mmspectral.fold(model)
    assert dict(sites) == dict(found)
    assert all(type(layer.qkv) is nn.Linear for layer in model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-14)
    for _ in range(2):
        mmspectral.unfold(model, sites)
        torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)
        for name, tensor in weights.items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-14)
        mmspectral.layers.fold(model)  # which leaves the hooks of readers; they must not add C twice


def test_weights_are_read_as_w_plus_c_only_during_the_forward_pass():
    """Initialisers, optimizers and reports see the parameter W."""
    model, _, x = pair(Reader)
    mmspectral.condition(model, CONDITIONING)
    assert isinstance(model[0].qkv, WeightReadLinear) and isinstance(model[0].qkv, ConditionedLinear)
    model(x)
    assert model[0].qkv.weight is dict(model.named_parameters())["0.qkv.weight"]
    nn.init.zeros_(model[0].qkv.weight)
    C = reference.identity_matrix(36, 12, [2.0] * 3, 3, "[3][heads][d]", "full")
    torch.testing.assert_close(model[0].qkv.effective_weight(), C)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 11).double())
    assert isinstance(model[0].qkv.weight, nn.Parameter), "an error in the forward pass left W + C behind"


def test_a_copy_of_a_reader_reads_its_own_weights():
    model, expected, x = pair(Reader)
    mmspectral.condition(model, CONDITIONING)
    ema = copy.deepcopy(model)
    nn.init.zeros_(model[0].qkv.weight)
    torch.testing.assert_close(ema(x), expected(x), rtol=1e-12, atol=1e-12)


@ATTENTIONS
def test_compiles(attention):
    model, expected, x = pair(attention)
    mmspectral.condition(model, CONDITIONING)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), expected(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [QKNorm(), SVDCorrection(interval=5)])
def test_what_cannot_be_shown_to_a_reader_is_refused(settings):
    for model in (nn.Sequential(Reader()), nn.Sequential(nn.MultiheadAttention(12, 3))):
        modules = list(model.modules())
        with pytest.raises(ValueError, match="never calls one: it reads the weights"):
            mmspectral.condition(model, settings)
        assert list(model.modules()) == modules
    mmspectral.condition(nn.Sequential(Caller()), settings)


def test_a_reader_of_the_packed_weights_is_refused():
    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 3)

        def forward(self, x):
            return F.linear(x, self.attn.in_proj_weight, self.attn.in_proj_bias)

    with pytest.raises(ValueError, match="Pooling reads in_proj_weight of its attention 'attn'.*exclude"):
        mmspectral.condition(Pooling(), CONDITIONING)


def test_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(Caller(), Caller(dim=12, num_heads=5))
    with pytest.raises(ValueError, match="36 is not a multiple of 15"):
        mmspectral.condition(model, CONDITIONING)
    assert all(type(layer.qkv) is nn.Linear for layer in model)


def test_a_shared_attention_layer_is_conditioned_once():
    layer = Caller()
    model = nn.Sequential(layer, layer)
    assert list(mmspectral.condition(model, CONDITIONING)) == ["0.qkv"]
    assert isinstance(model[1].qkv, ConditionedLinear)


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


def check(model, x, num_sites, **options):
    """Against the stock model with W + C written into its weights by hand."""
    expected = copy.deepcopy(model)
    modules = dict(expected.named_modules())
    found = mmspectral.condition(model, CONDITIONING, **options)
    assert len(found) == num_sites
    for name, (correction, layout) in found.items():
        module = modules[name]
        weight = module.in_proj_weight if isinstance(module, nn.MultiheadAttention) else module.weight
        scales = [correction.scale] * len(layout.roles)
        C = reference.identity_matrix(*weight.shape, scales, layout.num_heads, layout.row_order, "full")
        with torch.no_grad():
            weight.add_(C)
    with torch.no_grad():
        ours = model(x)
        torch.testing.assert_close(ours, expected(x), rtol=1e-3, atol=1e-3)
        assert list(model.state_dict()) == list(expected.state_dict())
        sites = mmspectral.fold(model)
        torch.testing.assert_close(model(x), ours, rtol=1e-3, atol=1e-3)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-6)
        mmspectral.unfold(model, sites)
        torch.testing.assert_close(model(x), ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "kwargs", "num_sites"),
    [
        ("vit_tiny_patch16_224", dict(img_size=32), 2),
        ("beit_base_patch16_224", dict(img_size=32, embed_dim=48, num_heads=3), 2),
        ("swinv2_tiny_window8_256", dict(img_size=32, window_size=2, embed_dim=24, num_heads=(1, 2)), 2),
        ("xcit_nano_12_p16_224", {}, 8),
        pytest.param("pvt_v2_b0", {}, 16, marks=pytest.mark.slow),
        pytest.param("convit_tiny", dict(img_size=32), 22, marks=pytest.mark.slow),
        pytest.param("maxvit_rmlp_pico_rw_256", dict(img_size=64), 22, marks=pytest.mark.slow),
    ],
)
def test_timm(name, kwargs, num_sites):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    if name.startswith(("vit", "beit", "xcit")):
        kwargs = dict(kwargs, depth=2)
    if name.startswith("swinv2"):
        kwargs = dict(kwargs, depths=(1, 1))
    model = perturbed(timm.create_model(name, num_classes=3, **kwargs))
    check(model, torch.randn(1, 3, kwargs.get("img_size", 32), kwargs.get("img_size", 32)), num_sites)


def test_torchvision_swin_is_not_silently_left_out():
    """Its attention multiplies by self.qkv.weight: a replaced projection is never called."""
    models = pytest.importorskip("torchvision.models.swin_transformer")
    torch.manual_seed(0)
    for block in (models.SwinTransformerBlock, models.SwinTransformerBlockV2):
        model = models.SwinTransformer([4, 4], 24, [1, 1], [2, 2], [2, 2], num_classes=3, block=block)
        assert all(site.reads_weight for site in find_sites(model))
        check(perturbed(model), torch.randn(1, 3, 16, 16), 2)


def test_torchvision_vit():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = perturbed(models.VisionTransformer(32, 16, 2, 4, 32, 64, num_classes=3))
    check(model, torch.randn(1, 3, 32, 32), 2)


def test_mmpretrain_readers():
    """Swin V2 and BEiT multiply by self.qkv.weight."""
    backbones = pytest.importorskip("mmpretrain.models.backbones")
    torch.manual_seed(0)

    class First(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def forward(self, x):
            return self.backbone(x)[0]

    arch = dict(embed_dims=24, depths=[1, 1], num_heads=[2, 2], extra_norm_every_n_blocks=0)
    swin = backbones.SwinTransformerV2(arch, img_size=32, window_size=[4, 4], pad_small_map=True, out_indices=(1,))
    beit = backbones.BEiTViT(dict(embed_dims=24, num_layers=2, num_heads=2, feedforward_channels=48), img_size=32)
    for backbone in (swin, beit):
        model = First(backbone)
        assert all(site.reads_weight for site in find_sites(model))
        check(perturbed(model), torch.randn(1, 3, 32, 32), 2)


def test_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)

    class Last(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)[0]

    tokens = torch.randint(0, 50, (2, 7))
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))
    check(perturbed(Last(bert)), tokens, 6)
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=16, **sizes))
    check(perturbed(Last(vit)), torch.randn(1, 3, 32, 32), 6)
    llama = transformers.LlamaModel(
        transformers.LlamaConfig(vocab_size=50, **dict(sizes, num_attention_heads=4), num_key_value_heads=2)
    )
    assert {site.num_heads for site in find_sites(llama)} == {2, 4}
    check(perturbed(Last(llama)), tokens, 6)
    neox = transformers.GPTNeoXModel(transformers.GPTNeoXConfig(vocab_size=50, **sizes))
    check(perturbed(Last(neox)), tokens, 2, layout=dict(row_order="[heads][3][d]"))


def test_names_of_the_package():
    assert {"condition", "fold", "unfold"} <= set(mmspectral.__all__)
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        mmspectral.unknown  # noqa: B018
    assert mmspectral.condition(nn.Sequential(Caller()), IdentityCorrection(1.0))

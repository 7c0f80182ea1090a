"""What every backbone promises, each promise once; a family's own file keeps its peculiarities."""

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from mmpretrain.models import backbones as stock_backbones
from torch import nn

from mmspectral import models
from mmspectral.layers import conditioned_projections, feature_kernels, fold, unfold
from mmspectral.models.backbones.xcit import ARCHITECTURES
from mmspectral.registry import MODELS

PLAIN = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=64)
XCIT = dict(embed_dims=32, depth=3, num_heads=4)
STAGES = dict(embed_dims=16, depths=[2, 1, 2], num_heads=[2, 4, 8])
DARK = dict(kernel=dict(type="dark", num_features=16, proposal="sharp", shift="learned"))
SCALE = 0.5
CONDITIONING = dict(type="IdentityCorrection", scale=SCALE)
BOTH = pytest.mark.parametrize("conditioning", [None, CONDITIONING], ids=["unconditioned", "conditioned"])


@dataclass(frozen=True)
class Case:
    """One backbone at its smallest.

    Args:
        name: Name of the class in ``mmspectral.models``.
        settings: Of the classifier.
        dense: Further settings of the form with a map per block or stage.
        stock: mmpretrain's class with the same parameters, and its further settings; None if there is none.
        size: Image on which stock and ours are compared.
        conditioned: Names of the arguments that take a conditioning.
        blocks: Names of the blocks in order.
        frozen: From ``frozen_stages`` to the beginnings of frozen parameters' names.
        frozen_until: Largest ``frozen_stages``.
        wrong: Arguments that are refused, and what the error says.
        forms: Further settings under which stock and ours are compared.
    """

    name: str
    settings: dict
    dense: dict
    stock: tuple[str, dict] | None
    blocks: tuple[str, ...]
    frozen: Callable[[int], tuple[str, ...]]
    frozen_until: int
    size: tuple[int, int] = (48, 64)
    conditioned: tuple[str, ...] = ("conditioning",)
    wrong: tuple[tuple[dict, str], ...] = field(default=())
    forms: tuple[dict, ...] = ()

    def build(self, conditioning: dict | None = None, dense: bool = False, **kwargs) -> nn.Module:
        settings = self.settings | (self.dense if dense else {}) | dict.fromkeys(self.conditioned, conditioning)
        return getattr(models, self.name)(**copy.deepcopy(settings | kwargs))

    def build_stock(self, **kwargs) -> nn.Module:
        name, own = self.stock
        settings = {key: value for key, value in self.settings.items() if key not in ("kernel", "distillation")}
        settings |= own | kwargs
        if name == "XCiT":  # mmpretrain has no named sizes
            settings |= settings.pop("arch")
        return getattr(stock_backbones, name)(**copy.deepcopy(settings))

    def __str__(self) -> str:
        return self.name


def plain(name, stock, forms=(), **settings):
    def frozen(n):
        stem = ("patch_embed.", "pos_embed", "cls_token", "dist_token", "pre_norm.")
        return (*stem, *(f"layers.{i}." for i in range(n)), *(["ln1."] if n == 3 else [])) if n >= 0 else ()

    return Case(
        name,
        dict(arch=PLAIN, img_size=(48, 64), **settings),
        dict(out_type="featmap", out_indices=[0, 1, 2]),
        stock and (stock, {}),
        tuple(f"layers.{i}" for i in range(3)),
        frozen,
        3,
        wrong=(
            (dict(arch="vit-small"), f"unknown {name} arch 'vit-small'; choose s, small"),
            (dict(out_indices=9), r"out_indices \[9\] must be .*\[-3, 3\)"),
            (dict(out_indices=()), "out_indices"),
            (dict(frozen_stages=4), r"frozen_stages must lie in \[-1, 3\], got 4"),
            (dict(out_type="map"), "out_type"),
            (dict(with_cls_token=False), "with_cls_token"),
        ),
        forms=forms,
    )


def staged(name, stock, size=(64, 96), until=2, wrong=(), **settings):
    def frozen(n):
        stages = (f"{part}{i}." for part in ("stages.", "norm") for i in range(n + 1))
        return ("patch_embed.", *stages) if n >= 0 else ()

    depths = STAGES["depths"]
    return Case(
        name,
        dict(arch=STAGES, **settings),
        dict(out_indices=(0, 1, 2)),
        stock and (stock, dict(out_indices=(2,), **({} if "pad_small_map" in settings else dict(pad_small_map=True)))),
        tuple(f"stages.{i}.blocks.{j}" for i, depth in enumerate(depths) for j in range(depth)),
        frozen,
        until,
        size=size,
        conditioned=("conditioning", "channel_conditioning") if stock == "DaViT" else ("conditioning",),
        wrong=(
            (dict(arch="huge!"), "unknown .* arch 'huge!'; choose t, tiny"),
            (dict(arch=dict(embed_dims=16)), "depths.* num_heads"),
            (dict(out_indices=(3,)), r"out_indices \[3\].*there are 3 stages"),
            (dict(out_indices=()), "out_indices"),
            (dict(frozen_stages=7), rf"frozen_stages must lie in \[-1, {until}\]"),
            *wrong,
        ),
    )


def frozen_xcit(n):
    if n < 0:
        return ()
    blocks = ("xca_layers.0.", "xca_layers.1.", "xca_layers.2.", "ca_layers.0.", "ca_layers.1.")[:n]
    return ("patch_embed.", "pos_embed.", *blocks, *(["cls_token"] if n > 3 else []), *(["norm."] if n == 5 else []))


VIT_FORMS = (
    dict(out_type="avg_featmap", with_cls_token=False, final_norm=False, pre_norm=True),
    dict(out_type="raw", layer_scale_init_value=0.1, drop_rate=0.1, layer_cfgs=dict(attn_drop_rate=0.1)),
    dict(qkv_bias=False, patch_size=8, interpolate_mode="bilinear"),
)
CASES = [
    Case(
        "SpectralXCiT",
        dict(arch=XCIT, patch_size=8),
        dict(out_type="featmap", out_indices=(0, 1, 2)),
        ("XCiT", {}),
        tuple(f"xca_layers.{i}" for i in range(3)),
        frozen_xcit,
        5,
        conditioned=("conditioning", "class_attention_conditioning"),
        wrong=(
            (dict(arch="small"), "unknown XCiT arch 'small'; choose nano-12"),
            (dict(out_indices=(7,)), "out_indices"),
            (dict(out_type="featmap", out_indices=()), "out_indices"),
            (dict(frozen_stages=6), r"must lie in \[-1, 5\]"),
            (dict(out_type="featmap", out_indices=(1,), frozen_stages=3), r"must lie in \[-1, 2\]"),
            (dict(patch_size=7), "16 or 8"),
        ),
    ),
    staged("SpectralSwin", "SwinTransformer", window_size=4, pad_small_map=True, use_abs_pos_embed=False),
    plain("SpectralViT", "VisionTransformer", VIT_FORMS),
    plain("SpectralDeiT", "DistilledVisionTransformer", (dict(out_type="raw"),), distillation=True),
    staged(
        "SpectralDaViT",
        "DaViT",
        size=(64, 128),
        until=3,
        wrong=((dict(out_after_downsample=True), "out_after_downsample"),),
    ),
    plain("DarkViT", None, **DARK),
    plain("DarkDeiT", None, distillation=True, **DARK),
    staged("DarkSwin", None, **DARK),
]
SPECTRAL = [case for case in CASES if case.stock]
EACH = pytest.mark.parametrize("case", CASES, ids=str)
EACH_SPECTRAL = pytest.mark.parametrize("case", SPECTRAL, ids=str)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def flat(outputs):
    """The tensors of outputs, which are pairs for a distilled classifier."""
    return [t for out in outputs for t in (out if isinstance(out, (tuple, list)) else (out,))]


def loss_of(outputs):
    return sum(out.float().square().mean() for out in flat(outputs))


def randomize(model):
    """Move every parameter off its start, so that a mixed-up norm, bias or token shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def images(case, *size, batch=2):
    return torch.randn(batch, 3, *(size or case.size), generator=torch.Generator().manual_seed(2))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


@EACH_SPECTRAL
def test_unconditioned_is_bit_equal_to_mmpretrain(case):
    """Names, outputs in both modes, and gradients, with every parameter random and stochastic depth."""
    for form in ({}, case.dense, *case.forms):
        stock = randomize(case.build_stock(drop_path_rate=0.5, **form))
        ours = case.build(drop_path_rate=0.5, **form)
        ours.load_state_dict(stock.state_dict(), strict=True)
        if not (form and case.name == "SpectralXCiT"):  # whose dense form builds no class attention
            stock.load_state_dict(ours.state_dict(), strict=True)
        sizes = [case.size] if "depths" in case.settings["arch"] else [case.size, (33, 47)]
        for size, train in itertools.product(sizes, (False, True)):
            outputs = []
            for model in (stock, ours):
                model.train(train)  # returns None in mmpretrain's Swin, DaViT and XCiT
                torch.manual_seed(1)
                outputs.append(model(images(case, *size)))
            assert same(*outputs)
        for out in outputs:
            loss_of(out).backward()
        expected = dict(stock.named_parameters())
        assert [n for n, p in ours.named_parameters() if not torch.equal(p.grad, expected[n].grad)] == []


@EACH_SPECTRAL
def test_construction_draws_the_random_numbers_of_mmpretrain(case):
    built = []
    for build in (case.build_stock, case.build):
        torch.manual_seed(0)
        built.append(build().state_dict())
    assert list(built[0]) == list(built[1])
    # mmpretrain's distillation token is zero until init_weights.
    assert [n for n, t in built[0].items() if n != "dist_token" and not torch.equal(t, built[1][n])] == []


@EACH
def test_conditioning_changes_the_function_and_no_name(case):
    stock, ours = randomize(case.build()).eval(), case.build(CONDITIONING).eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in stock.named_parameters()}
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in stock.named_buffers()]
    x = images(case)
    assert loss_of([a - b for a, b in zip(flat(ours(x)), flat(stock(x)), strict=True)]) > 1e-4
    conditioned = conditioned_projections(ours)
    assert not conditioned_projections(stock) and stock.conditioning is None
    assert all(any(name.startswith(f"{block}.") for name in conditioned) for block in case.blocks)
    assert ours.conditioning["scale"] == SCALE


@EACH
def test_folding_and_unfolding_keep_the_function(case):
    ours = randomize(case.build(CONDITIONING, dense=True).double().eval())
    state, x = copy.deepcopy(ours.state_dict()), images(case).double()
    before = ours(x)
    plain = case.build(dense=True).double().eval()
    plain.load_state_dict(fold(ours).state_dict(), strict=True)
    for a, b, c in zip(before, plain(x), unfold(ours)(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-13)


@BOTH
@pytest.mark.parametrize("size", [(16, 16), (33, 47), (70, 90), (8, 200), (4, 6)])
@EACH
def test_any_size_gives_described_maps_and_every_parameter_a_gradient(case, size, conditioning):
    """A parameter without a gradient stops DistributedDataParallel."""
    for indices in ((0, 1, 2), (1,), (0, 2)):
        model = case.build(conditioning, dense=True, out_indices=list(indices)).train()
        outputs = model(images(case, *size))
        assert len(outputs) == len(model.out_indices) == len(model.out_channels) == len(model.out_strides)
        for out, channels, stride in zip(outputs, model.out_channels, model.out_strides, strict=True):
            assert out.shape == (2, channels, *(math.ceil(side / stride) for side in size))
        loss_of(outputs).backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []
    classifier = case.build(conditioning).train()
    loss_of(classifier(images(case, *size))).backward()
    assert [n for n, p in classifier.named_parameters() if p.grad is None] == []


@EACH
def test_weights_of_the_whole_classifier_load_into_every_smaller_form(case):
    whole = randomize(case.build(dense=True)).eval()
    state = {**case.build().state_dict(), **whole.state_dict()}
    x = images(case)
    for indices in ((1,), (0, 2), (0, 1, 2)):
        part = case.build(dense=True, out_indices=list(indices)).eval()
        nn.ModuleDict({"backbone": part}).load_state_dict({f"backbone.{n}": t for n, t in state.items()}, strict=True)
        assert all(torch.equal(tensor, state[name]) for name, tensor in part.state_dict().items())
        if "num_layers" not in case.settings["arch"]:  # a plain transformer's last map alone is normalised
            expected = whole(x)
            assert same(part(x), [expected[i] for i in indices])
    with pytest.raises(RuntimeError, match="surplus"):
        part.load_state_dict({**state, f"{case.blocks[0]}.surplus": torch.zeros(1)}, strict=True)


@BOTH
@EACH
def test_recomputed_blocks_give_the_same_gradients_under_the_same_names(case, conditioning):
    """Non-reentrant: ``torch.autograd.grad`` refuses the other form."""
    ours = [case.build(conditioning, dense=True, drop_path_rate=0.5, with_cp=cp).train() for cp in (False, True)]
    assert list(ours[0].state_dict()) == list(ours[1].state_dict())
    ours[1].load_state_dict(randomize(ours[0]).state_dict(), strict=True)
    ours[1] = pickle.loads(pickle.dumps(copy.deepcopy(ours[1])))
    calls, grads = [], []
    block = ours[1].get_submodule(case.blocks[-1])
    next(block.children()).register_forward_hook(lambda *_: calls.append(1))
    for model in ours:
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(loss_of(model(images(case))), list(model.parameters())))
    assert same(*grads)
    assert len(calls) == 2  # once more in the backward pass
    with torch.no_grad():
        ours[1](images(case))
    assert len(calls) == 3
    for name, _ in ours[0].named_parameters():
        assert ours[0].get_layer_depth(name) == ours[1].get_layer_depth(name)


@EACH
def test_frozen_stages_freeze_the_stem_and_exactly_the_blocks_asked_for(case):
    for n in range(-1, case.frozen_until + 1):
        model = case.build(frozen_stages=n, drop_path_rate=0.1, with_cp=n == 1)
        names = [name for name, _ in model.named_parameters()]
        expected = [name for name in names if case.frozen(n) and name.startswith(case.frozen(n))]
        for _ in range(2):  # from construction on, when optimizers are built, through train()
            assert [name for name, p in model.named_parameters() if not p.requires_grad] == expected
            assert model.train() is model and model.training
        frozen = [m for name, m in model.named_modules() if f"{name}.".startswith(case.frozen(n) or ("-",))]
        assert not any(module.training for module in frozen)
        outputs = flat(model(images(case)))
        if len(expected) < len(names):
            loss_of(outputs).backward()
            assert [name for name, p in model.named_parameters() if p.grad is None] == expected
        assert model.eval() is model and not model.training


@EACH
def test_layer_depth_grows_with_the_blocks_and_covers_a_detector(case):
    model = case.build(dense=True)
    detector = nn.ModuleDict({"backbone": model, "neck": nn.Conv2d(1, 1, 1), "stages": nn.Linear(1, 1)})
    depths = {name: model.get_layer_depth(name, "backbone.") for name, _ in detector.named_parameters()}
    (total,) = {total for _, total in depths.values()}
    depths = {name: depth for name, (depth, _) in depths.items()}
    last = max(depths.values())
    assert last == total - 1 and {depths["neck.weight"], depths["stages.weight"]} == {last}
    assert {d for name, d in depths.items() if name.startswith(("backbone.patch_embed", "backbone.pos_embed"))} == {0}
    for i, block in enumerate(case.blocks):
        assert {d for name, d in depths.items() if name.startswith(f"backbone.{block}.")} == {i + 1}


@EACH
def test_no_weight_decay_names_parameters(case):
    model = case.build()
    names = {name for name, _ in model.named_parameters()}
    listed = model.no_weight_decay()
    assert listed <= names and not any(".qkv." in name or ".ffn." in name for name in listed)
    assert {name for name in names if ".kernel." in name} <= listed


@EACH
def test_initialisation_has_the_published_spread(case):
    width = "embed_dims"
    model = case.build(CONDITIONING, arch=case.settings["arch"] | {width: 64})
    model.init_weights()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".ffn." not in name and module.weight.numel() > 4000:
            assert abs(module.weight.std() - 0.02) < 0.002, name
        if isinstance(module, nn.Linear) and module.bias is not None and ".ffn." not in name:
            assert not module.bias.any(), name
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and not module.bias.any(), name


@EACH
def test_pretrained_weights_load_once_through_init_cfg(case, tmp_path):
    saved = randomize(case.build()).state_dict()
    torch.save(dict(state_dict={f"backbone.{name}": tensor for name, tensor in saved.items()}), tmp_path / "saved.pth")
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "saved.pth"), prefix="backbone.")
    model = case.build(init_cfg=init_cfg)
    model.init_weights()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    trained = copy.deepcopy(randomize(model).state_dict())
    model.init_weights()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())


@EACH
def test_copies_pickles_and_saved_weights_compute_the_same(case):
    model = randomize(case.build(CONDITIONING)).eval()
    for kernel in feature_kernels(model).values():
        kernel.redraw(7)
    x, stream = images(case), io.BytesIO()
    expected = model(x)
    assert same(model(x), expected)
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    fresh = case.build(CONDITIONING).eval()
    fresh.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert same(twin(x), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.1)
        assert same(model(x), expected) and not same(twin(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@EACH
def test_casts_keep_their_dtype(case, dtype):
    model = case.build(CONDITIONING, dense=True).to(dtype).eval()
    outputs = model(images(case).to(dtype))
    assert all(out.dtype == dtype and out.isfinite().all() for out in outputs)


@EACH
def test_compiles_into_one_graph_with_rates_from_numpy(case):
    arch = dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2]) if "depths" in case.settings["arch"] else None
    if arch is None:
        arch = {**case.settings["arch"], **{key: 1 for key in ("depth", "num_layers") if key in case.settings["arch"]}}
    model = case.build(CONDITIONING, arch=arch, drop_path_rate=np.float64(0.2)).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    outputs, x = [], images(case, 32, 40)
    for forward in (model, compiled):
        torch.manual_seed(1)
        outputs.append(flat(forward(x)))
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b)


@EACH
def test_is_built_from_a_config_and_refuses_wrong_arguments(case):
    settings = dict(case.settings, conditioning=dict(CONDITIONING, _scope_="mmspectral"))
    assert type(MODELS.build(dict(type=f"mmspectral.{case.name}", **settings))) is getattr(models, case.name)
    wrong = [
        (dict(conditioning=dict(type="NoSuch")), "unknown conditioning type"),
        (dict(conditioning=CONDITIONING | dict(size=3)), "no argument 'size'"),
        (dict(patchsize=8), "patchsize"),
    ]
    for kwargs, message in (*case.wrong, *wrong):
        with pytest.raises((ValueError, KeyError, TypeError), match=message):
            getattr(models, case.name)(**copy.deepcopy(case.settings | kwargs))


# In millions, with the head of 1,000 classes (and a second one of a distilled DeiT), from the authors' pages.
SIZES = {
    "SpectralXCiT": ({}, dict(zip(ARCHITECTURES, (3, 7, 12, 26, 48, 84, 189), strict=True))),
    "SpectralViT": ({}, {"deit-tiny": 5.7, "deit-small": 22.1, "base": 86.6, "large": 304.3}),
    "SpectralDeiT": (dict(distillation=True), {"deit-tiny": 5.9, "deit-small": 22.4, "deit-base": 87.3}),
    "SpectralSwin": ({}, dict(tiny=28.3, small=49.6, base=87.8, large=196.5)),
    "SpectralDaViT": ({}, dict(tiny=28.4, small=49.7, base=88.0)),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_the_published_parameters(name, monkeypatch):
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))  # of drop path, which are read
    settings, millions = SIZES[name]
    for arch, expected in millions.items():
        with torch.device("meta"):
            model = getattr(models, name)(arch, conditioning=CONDITIONING, **settings)
        heads = (1 + len(settings)) * 1000 * (model.out_channels[-1] + 1)
        found = (sum(p.numel() for p in model.parameters()) + heads) / 1e6
        assert round(found, 0 if isinstance(expected, int) else 1) == expected, arch


@EACH
def test_attention_that_starts_one_hot_is_warned_of(case):
    if case.name == "SpectralXCiT":
        pytest.skip("cross-covariance attention normalises q and k")
    wide = {key: 64 if key == "embed_dims" else value for key, value in case.settings["arch"].items()}
    if "depths" in wide:
        wide |= dict(depths=[1], num_heads=[1])
    kernel = dict(kernel=None) if "kernel" in case.settings else {}
    with pytest.warns(UserWarning, match=f"{case.name} with .*attention of .* starts"):
        getattr(models, case.name)(
            **(case.settings | kernel | dict(arch=wide, conditioning=dict(type="IdentityCorrection", scale=10.0)))
        )

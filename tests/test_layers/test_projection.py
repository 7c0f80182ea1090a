"""What every conditioning of a projection promises, and the settings that build one."""

import copy
import io
import pickle

import pytest
import torch
from mmengine.model import BaseModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmspectral import ops
from mmspectral.layers import (
    METADATA_KEY,
    Correction,
    Projection,
    build_conditioning,
    condition_linear,
    refresh_corrections,
    register_conditioning,
)
from mmspectral.layers.projection import _TYPES
from mmspectral.models import SpectralXCiT
from mmspectral.ops import ProjectionLayout

E, HEADS, D = 12, 3, 12
ROLES = ("q", "k", "v")
ALTERNATIVES = [
    dict(type="QKNorm"),
    dict(type="QKNorm", norm="rms"),
    dict(type="SpectralNorm"),
    dict(type="SigmaReparam"),
    dict(type="SigmaReparam", gamma=None),
    dict(type="OrthogonalInit", gain=0.5),
]
CORRECTIONS = [
    dict(type="IdentityCorrection", scale=7.0),
    dict(type="IdentityCorrection", scale=dict(q=7.0, v=2.0), scope="head", preserve_norm=0.2),
    dict(type="SVDCorrection"),
    dict(type="SVDCorrection", interval=3, scope="head"),
    dict(type="PolarCorrection"),
    dict(type="PolarCorrection", interval=4),
]
EVERY = ALTERNATIVES + CORRECTIONS
DIVISIONS = [cfg for cfg in EVERY if cfg["type"] in ("SpectralNorm", "SigmaReparam")]
STATEFUL = DIVISIONS + [cfg for cfg in EVERY if "interval" in cfg]
ROW_ORDERS = pytest.mark.parametrize("row_order", ops.ROW_ORDERS)


def each(cfgs):
    return pytest.mark.parametrize("cfg", cfgs, ids=lambda cfg: "-".join(map(str, cfg.values())))


def new_names(cfg, roles):
    """What a projection of ``roles`` has in its state dict besides weight and bias."""
    names = {
        "QKNorm": [f"{role}_norm.weight" for role in roles if role != "v"],
        "SpectralNorm": ["left", "right"],
        "SigmaReparam": ["left", "right", "gamma"],
    }
    return names.get(cfg["type"], ["correction"] if "interval" in cfg else [])


class Attention(nn.Module):
    """A fused projection and separate ones, as in a user's own model."""

    def __init__(self, cfg=None, row_order="[3][heads][d]", dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(E, 3 * D, dtype=dtype)
        for role in ROLES:
            setattr(self, role, nn.Linear(E, D, bias=False, dtype=dtype))
        torch.manual_seed(1)
        condition_linear(self, "qkv", build_conditioning(cfg), ROLES, HEADS, row_order)
        for role in ROLES:
            condition_linear(self, role, build_conditioning(cfg), (role,), HEADS, row_order)

    def forward(self, x):
        return torch.cat([self.qkv(x), self.q(x), self.k(x), self.v(x)], dim=-1)


def tokens(dtype=torch.float64):
    return torch.randn(2, 5, E, generator=torch.Generator().manual_seed(3)).to(dtype)


def train(models, steps, with_cp=False, start=0):
    """Train every model on the sum of its outputs; the i-th sees what the others see."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    for step in range(start, start + steps):
        x = torch.randn(2, 4, E, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for model, optimizer in zip(models, optimizers, strict=True):
            refresh_corrections(model, updates=step)
            optimizer.zero_grad()
            y = checkpoint(model, x, use_reentrant=False) if with_cp else model(x)
            (y + 1).sin().square().sum().backward()
            optimizer.step()


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@each(EVERY)
def test_parameters_are_those_of_the_stock_projection(cfg):
    linear = nn.Linear(E, 3 * D).requires_grad_(False).eval()
    ours = build_conditioning(cfg).replace(linear, ProjectionLayout(ROLES, HEADS))
    assert ours.weight is linear.weight and ours.bias is linear.bias
    assert not any(module.training for module in ours.modules())
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    with pytest.raises(ValueError, match="not a multiple"):
        build_conditioning(cfg).replace(nn.Linear(8, 20), ProjectionLayout(ROLES, 2))


@each(EVERY)
def test_state_dicts_go_round_and_stock_ones_miss_only_the_new_names(cfg):
    ours, other = Attention(cfg), Attention(cfg)
    with torch.no_grad():
        for tensor in ours.state_dict().values():
            tensor.add_(torch.rand_like(tensor))
    assert other.load_state_dict(ours.state_dict(), strict=True) and same_state(ours, other)
    missing, unexpected = ours.load_state_dict(Attention().state_dict(), strict=False)
    new = {f"qkv.{name}" for name in new_names(cfg, ROLES)}
    for role in ROLES:
        new |= {f"{role}.{name}" for name in new_names(cfg, role)}
    assert ours.state_dict().keys() - Attention().state_dict().keys() == new
    assert set(missing) == (set() if "interval" in cfg else new) and unexpected == []
    learned = {name for name, _ in ours.named_parameters()} - {name for name, _ in Attention().named_parameters()}
    assert learned == {name for name in new if name.endswith(("norm.weight", "gamma"))}


@each(EVERY)
def test_settings_are_in_the_metadata_and_build_the_same_again(cfg):
    buffer = io.BytesIO()
    ours = Attention(cfg)
    torch.save(copy.deepcopy(ours).state_dict(), buffer)
    buffer.seek(0)
    metadata = torch.load(buffer, weights_only=True)._metadata["qkv"]
    if cfg["type"] == "OrthogonalInit":  # a start: the weights are those of a stock model
        assert METADATA_KEY not in metadata
    else:
        entry = dict(metadata[METADATA_KEY])
        assert ProjectionLayout(**entry.pop("layout")) == ours.qkv.layout
        assert build_conditioning(entry) == build_conditioning(cfg)
    conditioning = build_conditioning(cfg)
    again = build_conditioning(dict(conditioning.settings(), type=f"mmspectral.{cfg['type']}", _scope_="mmdet"))
    assert copy.deepcopy(again) == pickle.loads(pickle.dumps(again)) == conditioning
    assert hash(again) == hash(conditioning) and build_conditioning(again) is again
    assert cfg["type"] in repr(ours.qkv)


@ROW_ORDERS
@each(EVERY)
def test_folds_into_a_plain_linear(cfg, row_order):
    model = Attention(cfg, row_order)
    train([model], steps=2)
    model.eval()
    if cfg["type"] == "QKNorm":
        with pytest.raises(ValueError, match="cannot be folded"):
            model.qkv.folded()
        return
    folded = model.qkv.folded()
    assert type(folded) is nn.Linear and not folded.training
    torch.testing.assert_close(folded(tokens()), model.qkv(tokens()), rtol=1e-13, atol=1e-13)
    assert METADATA_KEY not in folded.state_dict()._metadata[""]


class Block(nn.Module):
    """Not a BaseModule, as in XCiT: mmengine's init_weights does not descend into it."""

    def __init__(self, cfg):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * D)
        condition_linear(self, "qkv", build_conditioning(cfg), ROLES, HEADS, "[3][heads][d]")


class MMBlock(BaseModule):
    def __init__(self, cfg):
        super().__init__()
        self.inner = Block(cfg)
        self.qkv = self.inner.qkv


class Backbone(BaseModule):
    """Blocks that mmengine's init_weights reaches, and blocks that it does not."""

    def __init__(self, cfg, init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02, bias=0.25)):
        super().__init__(init_cfg)
        self.plain = nn.ModuleList([Block(cfg)])
        self.blocks = nn.ModuleList([MMBlock(cfg)])


def assert_state_is_that_of_its_weight(projection):
    if projection.changes_function:
        linear = nn.Linear(E, len(projection.weight), dtype=projection.weight.dtype)
        linear.load_state_dict({name: projection.state_dict()[name] for name in ("weight", "bias")})
        assert same_state(projection, projection.conditioning.replace(linear, projection.layout))


@each(EVERY)
def test_a_new_weight_gets_its_own_state(cfg):
    """Initialised by mmengine as linears are, loaded from stock names, assigned to what was built without memory.

    mmengine's initialisers know layers by the names of the class and its direct bases.
    """
    torch.manual_seed(0)
    model = Backbone(dict(cfg, targets=("q",)) if "scale" not in cfg else cfg)
    model.init_weights()
    for block in (model.plain[0], model.blocks[0]):
        assert (block.qkv.bias == 0.25).all()
        assert 0.015 < block.qkv.weight[D:].std() < 0.025
        if cfg["type"] == "OrthogonalInit":
            weight = block.qkv.layout.split(block.qkv.weight.detach())[0]
            torch.testing.assert_close(weight @ weight.T, cfg["gain"] ** 2 * torch.eye(D))
        else:
            assert 0.015 < block.qkv.weight[:D].std() < 0.025
        assert_state_is_that_of_its_weight(block.qkv)
    model, stock = Attention(cfg), Attention()
    train([model], steps=1)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(torch.randn_like(parameter))
    if cfg["type"] != "QKNorm":  # its gains are trained, not a function of W
        model.load_state_dict(stock.state_dict(), strict=False)
        assert_state_is_that_of_its_weight(model.qkv)
    with torch.device("meta"):
        on_meta = Attention(cfg)
    assert all(tensor.is_meta for tensor in on_meta.state_dict().values())
    assert on_meta(torch.empty(2, 5, E, device="meta", dtype=torch.float64)).shape == (2, 5, 6 * D)
    on_meta.qkv.bias, on_meta.qkv.weight = stock.qkv.bias, stock.qkv.weight
    assert not any(tensor.is_meta for tensor in on_meta.qkv.state_dict().values())
    assert_state_is_that_of_its_weight(on_meta.qkv)
    if "interval" in cfg:
        model.qkv.weight = nn.Parameter(torch.randn_like(model.qkv.weight))
        assert_state_is_that_of_its_weight(model.qkv)
    before = copy.deepcopy(model)
    for module in (model, before):
        for buffer in module.buffers():
            buffer.mul_(2)
    model.apply(lambda module: module.float())  # a cast is no new weight
    assert same_state(model, before.float())


@each(EVERY)
def test_a_loaded_checkpoint_wins(cfg, tmp_path):
    trained = Backbone(cfg)
    trained.init_weights()
    with torch.no_grad():
        for tensor in trained.state_dict().values():
            tensor.mul_(1.5)
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    scratch = dict(type="TruncNormal", layer="Linear", std=0.02)
    model = Backbone(cfg, [dict(type="Pretrained", checkpoint=str(tmp_path / "trained.pth")), scratch])
    model.init_weights()
    assert same_state(model, trained)


@each(EVERY)
def test_backbones_take_every_conditioning(cfg):
    """The layer takes over the stock layer's parameters."""
    model = SpectralXCiT(arch=dict(embed_dims=E, depth=2, num_heads=HEADS), patch_size=8, conditioning=cfg)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert isinstance(model.xca_layers[0].attn.qkv, Projection)
    model.init_weights()
    assert_state_is_that_of_its_weight(model.xca_layers[0].attn.qkv)
    refresh_corrections(model, updates=0)
    model.train()(torch.randn(2, 3, 16, 16))[0].square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("cfg", "error", "match"),
    [
        (dict(type="NoSuchCorrection"), KeyError, "known: .*IdentityCorrection"),
        (dict(scale=1.0), TypeError, "string 'type'"),
        ("IdentityCorrection", TypeError, "must be None or a dict"),
        # A child config with another type inherits the arguments of its parent's type.
        (dict(type="IdentityCorrection", interval=4), TypeError, "no argument 'interval'.*takes scale.*_delete_"),
        (dict(type="IdentityCorrection", scale="10"), ValueError, "finite number"),
        (dict(type="IdentityCorrection", scale=float("nan")), ValueError, "finite number"),
        (dict(type="IdentityCorrection", scale=dict(o=1.0)), ValueError, "keys out of the targets q, k, v"),
        (dict(type="IdentityCorrection", scale=dict(q=1.0), targets=["v"]), ValueError, "keys out of the targets v"),
        (dict(type="IdentityCorrection", preserve_norm=0.0), ValueError, "preserve_norm"),
        (dict(type="IdentityCorrection", preserve_norm=True), ValueError, "preserve_norm"),
        (dict(type="IdentityCorrection", scope="rows"), ValueError, "scope"),
        (dict(type="IdentityCorrection", targets=["o"]), ValueError, "targets"),
        (dict(type="IdentityCorrection", targets=[]), ValueError, "targets"),
        (dict(type="SVDCorrection", preserve_function=True), ValueError, "SVDCorrection: preserve_function"),
        (dict(type="SVDCorrection", interval=0), ValueError, "positive integer"),
        (dict(type="PolarCorrection", kappa=1e7), ValueError, "kappa"),
        (dict(type="QKNorm", targets=("q", "v")), ValueError, "take v out"),
        (dict(type="QKNorm", norm="batch"), ValueError, "one of layer, rms"),
        (dict(type="QKNorm", eps=0.0), ValueError, "eps must be positive"),
        (dict(type="SpectralNorm", power_iterations=0), ValueError, "SpectralNorm: power_iterations"),
        (dict(type="SigmaReparam", power_iterations=1.5), ValueError, "SigmaReparam: power_iterations"),
        (dict(type="SigmaReparam", gamma=-1.0), ValueError, "gamma must be None or positive"),
        (dict(type="OrthogonalInit", gain=float("nan")), ValueError, "gain must be positive"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(cfg, error, match):
    with pytest.raises(error, match=match):
        build_conditioning(cfg)


def test_how_weights_are_loaded_is_no_property_of_the_correction():
    settings = build_conditioning(dict(type="IdentityCorrection", preserve_function=True)).settings()
    assert not build_conditioning(settings).preserve_function and build_conditioning(None) is None


def test_users_own_correction():
    class AllOnes(Correction):
        def corrected(self, weight, layout, dtype=None):
            return (weight + 1).to(dtype or weight.dtype)

    with pytest.raises(TypeError, match="must subclass"):
        register_conditioning(nn.Linear)
    try:
        assert register_conditioning(AllOnes) is AllOnes
        correction = build_conditioning(dict(type="AllOnes", targets=["v"]))
        assert torch.equal(correction.matrix(torch.zeros(2, 3), ProjectionLayout(("v",), 1)), torch.ones(2, 3))
        impostor = type("AllOnes", (AllOnes,), {"__module__": "elsewhere"})
        with pytest.raises(ValueError, match="taken"):
            register_conditioning(impostor)
    finally:
        _TYPES.pop("AllOnes", None)

"""The switches against naive twins in float64, torch's own spectral norm, and mmengine's initialisation."""

import copy
import io
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mmengine.model import BaseModule, ExponentialMovingAverage
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from mmspectral import ops
from mmspectral.layers import METADATA_KEY, build_conditioning, condition_linear
from mmspectral.layers.alternatives import (
    OrthogonalLinear,
    Projection,
    QKNorm,
    QKNormLinear,
    SigmaReparamLinear,
    SpectralNormLinear,
)
from mmspectral.models import SpectralXCiT
from mmspectral.ops import ProjectionLayout

E, HEADS, D = 12, 3, 12
ROLES = ("q", "k", "v")
SWITCHES = [
    dict(type="QKNorm"),
    dict(type="QKNorm", norm="rms"),
    dict(type="SpectralNorm"),
    dict(type="SigmaReparam"),
    dict(type="SigmaReparam", gamma=None),
    dict(type="OrthogonalInit", gain=0.5),
]
DIVISIONS = [cfg for cfg in SWITCHES if cfg["type"] in ("SpectralNorm", "SigmaReparam")]
NEW_NAMES = {
    "QKNorm": ["q_norm.weight", "k_norm.weight"],
    "SpectralNorm": ["left", "right"],
    "SigmaReparam": ["left", "right", "gamma"],
    "OrthogonalInit": [],
}


def name_of(cfg):
    return "-".join(str(value) for value in cfg.values())


def each(switches):
    return pytest.mark.parametrize("cfg", switches, ids=name_of)


ROW_ORDERS = pytest.mark.parametrize("row_order", ops.ROW_ORDERS)


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


def by_role(fused, row_order):
    """Split rows (the last but one dimension of a weight, the last of outputs, put first here) by q, k, v."""
    index = {role: [] for role in ROLES}
    d = D // HEADS
    for p, role in enumerate(ROLES):
        for head in range(HEADS):
            start = (p * HEADS + head) * d if row_order == "[3][heads][d]" else (head * 3 + p) * d
            index[role] += range(start, start + d)
    return {role: fused[rows] for role, rows in index.items()}


def separate_copy(qkv, row_order):
    """The three nn.Linears that a fused projection stands for."""
    linears = {}
    weights, biases = by_role(qkv.weight, row_order), by_role(qkv.bias, row_order)
    for role in ROLES:
        linears[role] = nn.Linear(E, D, dtype=qkv.weight.dtype)
        linears[role].weight = nn.Parameter(weights[role].detach().clone())
        linears[role].bias = nn.Parameter(biases[role].detach().clone())
    return linears


@each(SWITCHES)
def test_parameters_are_those_of_the_stock_projection(cfg):
    linear = nn.Linear(E, 3 * D).requires_grad_(False).eval()
    ours = build_conditioning(cfg).replace(linear, ProjectionLayout(ROLES, HEADS))
    assert ours.weight is linear.weight and ours.bias is linear.bias
    assert not any(module.training for module in ours.modules())
    assert not any(parameter.requires_grad for parameter in ours.parameters())


@each(SWITCHES)
def test_state_dicts_go_round_and_stock_ones_miss_only_the_new_names(cfg):
    ours, other = Attention(cfg), Attention(cfg)
    with torch.no_grad():
        for tensor in ours.state_dict().values():
            tensor.add_(torch.rand_like(tensor))
    assert other.load_state_dict(ours.state_dict(), strict=True)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    missing, unexpected = ours.load_state_dict(Attention().state_dict(), strict=False)
    new = NEW_NAMES[cfg["type"]]
    expected = [f"qkv.{name}" for name in new]
    for role in ROLES:
        expected += [f"{role}.{name}" for name in new if "norm" not in name or name.startswith(role)]
    assert sorted(missing) == sorted(expected) and unexpected == []


@each(SWITCHES)
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
    assert build_conditioning(build_conditioning(cfg).settings()) == build_conditioning(cfg)
    assert cfg["type"] in repr(ours.qkv)


@ROW_ORDERS
@each(SWITCHES)
def test_every_parameter_gets_a_gradient_that_is_right(cfg, row_order):
    model = Attention(cfg, row_order)
    model(tokens()).sin().square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    model.eval()  # the power method would move between the two sides of a difference
    linear = model.qkv
    names, values = zip(*linear.named_parameters(), strict=True)

    def output(*parameters):
        return torch.func.functional_call(linear, dict(zip(names, parameters, strict=True)), (tokens()[:1, :2],))

    assert torch.autograd.gradcheck(output, values, fast_mode=True)


@ROW_ORDERS
@each(SWITCHES)
def test_copies_and_pickles_compute_the_same(cfg, row_order):
    model = Attention(cfg, row_order).eval()
    expected = model(tokens())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens()), expected)
        assert twin.qkv.weight.data_ptr() != model.qkv.weight.data_ptr()


@each(SWITCHES)
def test_low_precision_errs_at_most_twice_as_much_as_the_plain_projection(cfg):
    exact = Attention(cfg).eval()
    cast = copy.deepcopy(exact).bfloat16()
    autocast = copy.deepcopy(exact).float()
    x = tokens()
    errors = {}
    for name, model in (("cast", cast), ("autocast", autocast)):
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            y = model(x.to(model.qkv.weight.dtype))
        assert y.dtype == torch.bfloat16 and y.isfinite().all()
        errors[name] = (y.double() - exact(x)).norm() / exact(x).norm()
    stock = Attention().bfloat16()
    plain = (stock(x.bfloat16()).double() - Attention()(x)).norm() / Attention()(x).norm()
    assert max(errors.values()) < 2 * plain, (errors, plain)


@each([cfg for cfg in SWITCHES if "norm" not in cfg and cfg.get("gamma", 1.0) is not None])
def test_training_compiles_without_a_graph_break(cfg):
    eager = Attention(cfg, "[heads][3][d]", torch.float32).qkv
    compiled = copy.deepcopy(eager)
    x = tokens(torch.float32)
    torch.testing.assert_close(torch.compile(compiled, fullgraph=True, backend="aot_eager")(x), eager(x))
    for name, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(name))


# QKNorm


def naive_norm(y, gain, norm, eps=1e-6):
    """One vector at a time, float64."""
    rows = []
    for vector in y.double().reshape(-1, y.shape[-1]):
        centred = vector - vector.sum() / len(vector) if norm == "layer" else vector
        rows.append(gain.double() * centred / (centred.square().sum() / len(vector) + eps).sqrt())
    return torch.stack(rows).view_as(y)


@ROW_ORDERS
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_qk_norm_equals_its_naive_twin(norm, row_order):
    model = Attention(dict(type="QKNorm", norm=norm), row_order)
    stock = Attention(None, row_order)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
    x = tokens()
    fused = by_role(model.qkv(x).movedim(-1, 0), row_order)
    plain = by_role(stock.qkv(x).movedim(-1, 0), row_order)
    for role in ("q", "k"):
        for head in range(HEADS):
            rows = slice(head * D // HEADS, (head + 1) * D // HEADS)
            for projection, ours, theirs in (
                (model.qkv, fused[role][rows].movedim(0, -1), plain[role][rows].movedim(0, -1)),
                (model.get_submodule(role), getattr(model, role)(x)[..., rows], getattr(stock, role)(x)[..., rows]),
            ):
                gain = projection.get_submodule(f"{role}_norm").weight
                torch.testing.assert_close(ours, naive_norm(theirs, gain, norm), rtol=1e-12, atol=1e-12)
    assert torch.equal(fused["v"], plain["v"])
    assert type(model.v) is nn.Linear
    assert model.qkv.bfloat16().q_norm(x[..., : D // HEADS].bfloat16()).dtype == torch.float32


def test_qk_norm_equals_timms():
    timm = pytest.importorskip("timm")
    theirs = timm.layers.Attention(
        E, HEADS, qkv_bias=True, qk_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-6, bias=False)
    ).eval()
    ours = timm.layers.Attention(E, HEADS, qkv_bias=True).eval()
    condition_linear(ours, "qkv", QKNorm(), ROLES, HEADS, "[3][heads][d]")
    with torch.no_grad():
        for norm in (theirs.q_norm, theirs.k_norm):
            norm.weight.uniform_(0.5, 2)
    state = theirs.state_dict()
    ours.load_state_dict(
        {(f"qkv.{name}" if name.startswith(("q_norm", "k_norm")) else name): tensor for name, tensor in state.items()},
        strict=True,
    )
    x = tokens(torch.float32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_qk_norm_bounds_the_logits(norm):
    """At most sqrt(d) max|gain_q| max|gain_k|, and close to it for a token with itself, whatever the weights."""
    model = Attention(dict(type="QKNorm", norm=norm))
    d = D // HEADS
    with torch.no_grad():
        model.qkv.weight.mul_(1e4)
        model.qkv.weight[D : 2 * D] = model.qkv.weight[:D]  # W_k = W_q: the largest logits there are
        model.qkv.bias.zero_()
        model.qkv.q_norm.weight.fill_(3.0)
        model.qkv.k_norm.weight.fill_(-2.0)
    q, k, _ = model.qkv(tokens()).unflatten(-1, (3, HEADS, d)).permute(2, 0, 3, 1, 4)  # each [B, h, N, d]
    logits = q @ k.mT / math.sqrt(d)
    bound = math.sqrt(d) * 3 * 2
    assert 0.999 * bound < logits.abs().max() <= bound * (1 + 1e-12)
    stock_q, stock_k, _ = F.linear(tokens(), model.qkv.weight).unflatten(-1, (3, HEADS, d)).permute(2, 0, 3, 1, 4)
    assert (stock_q @ stock_k.mT).abs().max() > 1e3 * bound


def test_qk_norm_can_normalise_one_of_them_and_cannot_be_folded():
    model = Attention(dict(type="QKNorm", targets=["k"]))
    stock = Attention()
    assert torch.equal(model.qkv(tokens())[..., :D], stock.qkv(tokens())[..., :D])
    assert not torch.allclose(model.qkv(tokens())[..., D : 2 * D], stock.qkv(tokens())[..., D : 2 * D])
    assert type(model.q) is nn.Linear and isinstance(model.k, QKNormLinear)
    with pytest.raises(ValueError, match="cannot be folded"):
        model.qkv.folded()


def test_layer_norms_are_spared_weight_decay_as_other_norms_are():
    constructor = DefaultOptimWrapperConstructor(
        dict(optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.1)), paramwise_cfg=dict(norm_decay_mult=0.0)
    )
    model = Attention(dict(type="QKNorm"))
    groups = constructor(model).optimizer.param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay[id(model.qkv.q_norm.weight)] == 0 and decay[id(model.qkv.weight)] == 0.1


# SpectralNorm and SigmaReparam


def train(models, steps, with_cp=False):
    """Train every model on the sum of its outputs; the i-th sees what the others see."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    for step in range(steps):
        x = torch.randn(4, E, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            y = checkpoint(model, x, use_reentrant=False) if with_cp else model(x)
            (y + 1).sin().square().sum().backward()
            optimizer.step()


@ROW_ORDERS
def test_fused_spectral_norm_trains_as_three_of_torchs(row_order):
    """The twin is torch.nn.utils.parametrizations.spectral_norm on separate projections."""
    fused = Attention(dict(type="SpectralNorm"), row_order).qkv
    separate = nn.ModuleDict({role: spectral_norm(m) for role, m in separate_copy(fused, row_order).items()})
    for p, role in enumerate(ROLES):
        theirs = separate[role].parametrizations.weight[0]
        theirs._u.copy_(fused.left[p])
        theirs._v.copy_(fused.right[p])

    class Separate(nn.Module):
        def __init__(self):
            super().__init__()
            self.projections = separate

        def forward(self, x):
            return torch.cat([self.projections[role](x) for role in ROLES], dim=-1)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = fused

        def forward(self, x):
            outputs = by_role(self.qkv(x).movedim(-1, 0), row_order)
            return torch.cat([outputs[role].movedim(0, -1) for role in ROLES], dim=-1)

    train([Separate(), Fused()], steps=10)
    for role, weight in by_role(fused.weight, row_order).items():
        theirs = separate[role].parametrizations.weight
        torch.testing.assert_close(weight, theirs.original, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fused.left[ROLES.index(role)], theirs[0]._u, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(Fused().eval()(tokens()), Separate().eval()(tokens()), rtol=1e-12, atol=1e-12)


@ROW_ORDERS
@each(DIVISIONS)
def test_each_projection_is_divided_by_its_own_largest_singular_value(cfg, row_order):
    """The criterion is each block's, not the fused matrix's."""
    model = Attention(cfg, row_order).qkv
    with torch.no_grad():
        for factor, block in zip((1.0, 5.0, 0.2), model.layout.split(model.weight, "head"), strict=True):
            block.mul_(factor)
    model.init_weights()
    effective = by_role(model.effective_weight().detach(), row_order)
    for p, (role, weight) in enumerate(by_role(model.weight.detach(), row_order).items()):
        sigma = torch.linalg.svdvals(weight)[0]
        gamma = model.gamma[p].detach() if cfg["type"] == "SigmaReparam" else 1.0
        torch.testing.assert_close(effective[role], gamma * weight / sigma, rtol=1e-3, atol=0)
        if cfg.get("gamma", 1.0) is None:
            torch.testing.assert_close(effective[role], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows, columns", [(384, 384), (64, 256), (256, 64)])
def test_the_start_finds_the_largest_singular_value_to_two_per_cent(rows, columns):
    torch.manual_seed(0)
    for shape in ("normal", "decaying"):
        linear = nn.Linear(columns, rows, bias=False)
        nn.init.normal_(linear.weight, std=0.02)
        if shape == "decaying":
            u, s, v = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
            linear.weight.data = u @ torch.diag(s[0] / torch.arange(1, len(s) + 1)) @ v
        exact = torch.linalg.svdvals(linear.weight.detach())[0]
        ours = SpectralNormLinear(linear, build_conditioning(dict(type="SpectralNorm")), ProjectionLayout(("q",), 4))
        assert 0.98 * exact < ours.sigma().item() <= exact * (1 + 1e-5)


@pytest.mark.parametrize("targets", [("q",), ("k", "v")])
@ROW_ORDERS
@each(DIVISIONS)
def test_other_projections_are_left_alone(cfg, row_order, targets):
    model = Attention(dict(cfg, targets=targets), row_order)
    stock = Attention(None, row_order)
    assert model.qkv.left.shape == (len(targets), D)
    ours, theirs = (by_role(m.qkv(tokens()).movedim(-1, 0), row_order) for m in (model, stock))
    for role in ROLES:
        same = role not in targets or cfg.get("gamma", 1.0) is None
        assert torch.allclose(ours[role], theirs[role], rtol=1e-2 if same else 1e-12) == same
        assert (type(getattr(model, role)) is nn.Linear) == (role not in targets)


@ROW_ORDERS
@each(DIVISIONS)
def test_eval_is_constant_and_equals_the_folded_projection(cfg, row_order):
    model = Attention(cfg, row_order)
    train([model], steps=3)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    outputs = [model(tokens()) for _ in range(3)]
    assert all(torch.equal(outputs[0], other) for other in outputs)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    folded = model.qkv.folded()
    assert type(folded) is nn.Linear and not folded.training
    torch.testing.assert_close(folded(tokens()), model.qkv(tokens()), rtol=1e-13, atol=1e-13)
    assert METADATA_KEY not in folded.state_dict()._metadata[""]


@each(DIVISIONS)
def test_resuming_continues_exactly(cfg):
    whole = Attention(cfg)
    train([whole], steps=2)
    resumed = Attention(cfg)
    resumed.load_state_dict(whole.state_dict(), strict=True)
    train([whole, resumed], steps=3)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


@each(DIVISIONS)
def test_activation_checkpointing_changes_nothing(cfg):
    """The forward repeated in the backward pass must not move the singular vectors once more."""
    plain, checkpointed = Attention(cfg), Attention(cfg)
    train([plain], steps=4)
    train([checkpointed], steps=4, with_cp=True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, checkpointed.state_dict()[name]), name


@each(DIVISIONS)
def test_two_forwards_before_one_backward(cfg):
    """torch's in-place power method once broke the first forward's graph (note in torch/nn/utils/spectral_norm.py)."""
    model = Attention(cfg)
    (model(tokens()) - model(2 * tokens())).sum().backward()
    assert model.qkv.weight.grad.isfinite().all()


@each(DIVISIONS)
def test_the_power_method_follows_training(cfg):
    model = Attention(cfg)
    train([model], steps=20)
    model(tokens())
    exact = torch.stack([torch.linalg.svdvals(w)[0] for w in model.qkv.layout.split(model.qkv.weight)])
    torch.testing.assert_close(model.qkv.sigma(), exact, rtol=1e-3, atol=0)


@each(DIVISIONS)
def test_stock_weights_bring_their_own_singular_vectors(cfg):
    model, stock = Attention(cfg), Attention()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.load_state_dict(stock.state_dict(), strict=False)
    exact = torch.stack([torch.linalg.svdvals(w)[0] for w in model.qkv.layout.split(stock.qkv.weight)])
    torch.testing.assert_close(model.qkv.sigma(), exact, rtol=1e-2, atol=0)
    if cfg.get("gamma", 1.0) is None:
        torch.testing.assert_close(model.eval()(tokens()), stock(tokens()), rtol=1e-12, atol=1e-12)


def test_gamma_of_a_checkpoint_without_vectors_is_kept():
    cfg = dict(type="SigmaReparam", gamma=None)
    model, other = Attention(cfg), Attention(cfg)
    with torch.no_grad():
        model.qkv.gamma.copy_(torch.tensor([1.0, 2.0, 3.0]))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    missing, _ = other.load_state_dict(parameters, strict=False)
    assert {name.rpartition(".")[2] for name in missing} == {"left", "right"}
    assert other.qkv.gamma.tolist() == [1.0, 2.0, 3.0]


@each(DIVISIONS)
def test_zero_weights_give_zero_and_recover(cfg):
    model = Attention(dict(cfg))
    with torch.no_grad():
        model.qkv.weight.zero_()
        model.qkv.bias.zero_()
    model.qkv.init_weights()
    assert not model.qkv(tokens()).any()
    model.qkv(tokens()).sum().backward()
    assert model.qkv.weight.grad.isfinite().all()
    with torch.no_grad():
        model.qkv.weight.copy_(Attention().qkv.weight)
    model.qkv(tokens())
    assert (model.qkv.sigma() > 0).all()


@each(DIVISIONS)
def test_refresh_gives_averaged_models_the_sigma_of_the_averaged_weight(cfg):
    model = Attention(cfg)
    average = ExponentialMovingAverage(model, momentum=0.2)
    for _ in range(5):
        train([model], steps=1)
        average.update_parameters(model)
    qkv = average.module.qkv.eval()
    assert not torch.equal(qkv.weight, model.qkv.weight) and torch.equal(qkv.left, model.qkv.left)
    gamma = qkv.gamma.clone() if isinstance(qkv, SigmaReparamLinear) else None
    exact = torch.stack([torch.linalg.svdvals(w)[0] for w in qkv.layout.split(qkv.weight)])
    assert (qkv.sigma() < 0.99 * exact).any()  # as the docstring says: with the vectors of the trained model
    qkv.refresh()
    torch.testing.assert_close(qkv.sigma(), exact, rtol=0.01, atol=0)
    assert gamma is None or torch.equal(qkv.gamma, gamma)


# OrthogonalInit and initialisation in general


@ROW_ORDERS
def test_orthogonal_start_is_of_each_projection_with_the_gain(row_order):
    model = Attention(dict(type="OrthogonalInit", gain=0.5, targets=("q", "v")), row_order)
    stock = Attention(None, row_order)
    for role in ("q", "v"):
        for weight in (by_role(model.qkv.weight.detach(), row_order)[role], getattr(model, role).weight.detach()):
            expected = 0.25 * torch.eye(D, dtype=torch.float64)
            torch.testing.assert_close(weight @ weight.T, expected, rtol=0, atol=1e-12)
    assert torch.equal(by_role(model.qkv.weight, row_order)["k"], by_role(stock.qkv.weight, row_order)["k"])
    assert torch.equal(model.qkv.bias, stock.qkv.bias) and type(model.k) is nn.Linear
    x = tokens()
    assert torch.equal(model.qkv(x), F.linear(x, model.qkv.weight, model.qkv.bias))
    assert torch.equal(model.qkv.folded()(x), model.qkv(x)) and type(model.qkv.folded()) is nn.Linear


def test_orthogonal_start_of_bfloat16_and_rectangular_weights():
    for rows, columns in ((24, 12), (8, 12)):
        linear = nn.Linear(columns, rows, dtype=torch.bfloat16)
        build_conditioning(dict(type="OrthogonalInit", gain=2.0)).replace(linear, ProjectionLayout(("q",), 2))
        sigma = torch.linalg.svdvals(linear.weight.detach().float())
        torch.testing.assert_close(sigma, torch.full_like(sigma, 2.0), rtol=0.01, atol=0)


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


@each(SWITCHES)
def test_mmengine_initialises_the_projections_as_it_does_linears(cfg):
    """Its initialisers know layers by the names of the class and its direct bases."""
    targets = ("q",) if cfg["type"] in ("OrthogonalInit", "SpectralNorm", "SigmaReparam") else ("q", "k")
    torch.manual_seed(0)
    model = Backbone(dict(cfg, targets=targets))
    model.init_weights()
    for block in (model.plain[0], model.blocks[0]):
        assert (block.qkv.bias == 0.25).all()
        assert 0.015 < block.qkv.weight[D:].std() < 0.025
        if cfg["type"] != "OrthogonalInit":
            assert 0.015 < block.qkv.weight[:D].std() < 0.025


@pytest.mark.parametrize("initialiser", ["TruncNormal", "Xavier", "Kaiming", "Normal", "Uniform"])
def test_init_weights_ends_with_orthogonal_projections(initialiser):
    model = Backbone(dict(type="OrthogonalInit", gain=3.0), dict(type=initialiser, layer="Linear"))
    before = model.plain[0].qkv.weight.detach().clone()
    model.init_weights()
    assert not torch.equal(before, model.plain[0].qkv.weight)
    for block in (model.plain[0], model.blocks[0]):
        assert isinstance(block.qkv, OrthogonalLinear)
        for weight in block.qkv.layout.split(block.qkv.weight.detach()):
            torch.testing.assert_close(weight @ weight.T, 9 * torch.eye(D), rtol=0, atol=1e-4)


@each(DIVISIONS)
def test_init_weights_ends_with_the_sigma_of_the_drawn_weights(cfg):
    model = Backbone(cfg)
    model.init_weights()
    for block in (model.plain[0], model.blocks[0]):
        weights = block.qkv.layout.split(block.qkv.weight.detach())
        exact = torch.linalg.svdvals(weights)[:, 0]
        torch.testing.assert_close(block.qkv.sigma(), exact, rtol=1e-2, atol=0)
        if isinstance(block.qkv, SigmaReparamLinear) and cfg.get("gamma", 1.0) is None:
            torch.testing.assert_close(block.qkv.gamma, block.qkv.sigma())


@each(SWITCHES)
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
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name


def test_casting_by_apply_initialises_nothing():
    model = Attention(dict(type="OrthogonalInit"))
    before = copy.deepcopy(model.qkv.weight.detach())
    model.apply(lambda module: module.float())
    assert torch.equal(model.qkv.weight, before.float())


@each(SWITCHES)
def test_projections_can_be_built_on_the_meta_device(cfg):
    with torch.device("meta"):
        model = Attention(cfg)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model(torch.empty(2, 5, E, device="meta", dtype=torch.float64)).shape == (2, 5, 6 * D)


@each(SWITCHES)
def test_backbones_take_the_switches(cfg):
    """The layer takes over the stock layer's parameters."""
    torch.manual_seed(0)
    model = SpectralXCiT(arch=dict(embed_dims=E, depth=2, num_heads=HEADS), patch_size=8, conditioning=cfg)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    qkv = model.xca_layers[0].attn.qkv
    assert isinstance(qkv, Projection)
    exact = torch.linalg.svdvals(qkv.layout.split(qkv.weight.detach()))[:, 0]
    if isinstance(qkv, SpectralNormLinear):
        torch.testing.assert_close(qkv.sigma(), exact, rtol=0.02, atol=0)
    if isinstance(qkv, OrthogonalLinear):
        torch.testing.assert_close(exact, torch.full_like(exact, 0.5))
    model.init_weights()
    model.train()(torch.randn(2, 3, 16, 16))[0].square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "cfg, message",
    [
        (dict(type="QKNorm", targets=("q", "v")), "take v out"),
        (dict(type="QKNorm", norm="batch"), "one of layer, rms"),
        (dict(type="QKNorm", eps=0.0), "eps must be positive"),
        (dict(type="SpectralNorm", power_iterations=0), "SpectralNorm: power_iterations"),
        (dict(type="SigmaReparam", power_iterations=1.5), "SigmaReparam: power_iterations"),
        (dict(type="SigmaReparam", gamma=-1.0), "gamma must be None or positive"),
        (dict(type="OrthogonalInit", gain=float("nan")), "gain must be positive"),
        (dict(type="OrthogonalInit", targets=("o",)), "targets must be"),
    ],
)
def test_wrong_settings_are_refused(cfg, message):
    with pytest.raises(ValueError, match=message):
        build_conditioning(cfg)


@each(SWITCHES)
def test_wrong_rows_are_refused_when_built(cfg):
    with pytest.raises(ValueError, match="not a multiple"):
        build_conditioning(cfg).replace(nn.Linear(8, 20), ProjectionLayout(ROLES, 2))

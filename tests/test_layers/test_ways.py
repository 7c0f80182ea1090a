"""Every conditioning, every way in which attention reads its weights, and every kernel, run in every way."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

import mmspectral
from mmspectral.layers import DarkAttention, DerivedCorrection, refresh_corrections
from tests.test_layers.test_kernels import TYPES
from tests.test_layers.test_projection import EVERY, HEADS, Attention, E, each, same_state, tokens, train
from tests.test_layers.test_surgery import Aliasing, Both, Caller, Last, Reader, Recomputing


def build(subject, dtype=torch.float64):
    """Return a conditioning on fused and separate projections, an owner whose weight is W + C, or a kernel's layer."""
    torch.manual_seed(0)
    if isinstance(subject, type):
        model = mmspectral.condition(nn.Sequential(subject()), dict(type="IdentityCorrection", preserve_norm=0.1))
    elif subject is packed:
        model = mmspectral.condition(packed(), dict(type="IdentityCorrection", scale=2.0))
    elif subject in EVERY:
        model = Attention(subject, "[heads][3][d]")
    else:
        model = DarkAttention(E, HEADS, qkv_bias=True, kernel=subject, layer=2)
    if subject not in EVERY:
        for parameter in model.parameters():  # away from the identity, where mix-ups do not show
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    refresh_corrections(model, updates=1)
    return model.to(dtype)


def packed():
    return Last(nn.MultiheadAttention(E, HEADS, batch_first=True))


OWNERS = [Caller, Reader, Both, Aliasing, Recomputing, packed]
KERNELS = list(TYPES.values())
SUBJECTS = [*EVERY, *OWNERS, *KERNELS]
PLAIN = [cfg for cfg in EVERY if "norm" not in cfg and cfg.get("gamma", 1.0) is not None]


def each_of(subjects):
    return pytest.mark.parametrize(
        "subject", subjects, ids=lambda s: "-".join(map(str, s.values())) if isinstance(s, dict) else s.__name__
    )


def gradients(model, y):
    model.zero_grad()
    y.sin().square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@each_of(SUBJECTS)
def test_every_parameter_gets_a_gradient_that_is_right(subject):
    """A C that follows from W is a constant for autograd; test_corrections.py shows that."""
    model = build(subject)
    assert [name for name, grad in gradients(model, model(tokens())).items() if grad is None or not grad.any()] == []
    if any(isinstance(getattr(m, "conditioning", None), DerivedCorrection) for m in model.modules()):
        return
    model.eval()  # the power method would move between the two sides of a difference
    names, values = zip(*model.named_parameters(), strict=True)

    def output(*parameters):
        return functional_call(model, dict(zip(names, parameters, strict=True)), (tokens()[:1, :2],))

    assert torch.autograd.gradcheck(output, values, fast_mode=True)


@each_of(SUBJECTS)
def test_copies_pickles_and_saved_weights_compute_the_same(subject):
    model, other = build(subject), build(subject)
    train([model], steps=2)
    expected = model.eval()(tokens())
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other.eval()):
        assert torch.equal(twin(tokens()), expected) and same_state(twin, model)
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    train([model.train(), other.train()], steps=2, start=2)
    assert same_state(model, other), "training goes on as it would have"


@each_of(SUBJECTS)
def test_activation_checkpointing_changes_nothing(subject):
    """A forward repeated in the backward pass must not move singular vectors once more."""
    whole, recomputed = build(subject), build(subject)
    train([whole], steps=3)
    train([recomputed], steps=3, with_cp=True)
    assert same_state(whole, recomputed)


@each_of([subject for subject in SUBJECTS if subject is not Recomputing])  # torch recomputes with the module's own
def test_functional_calls_compute_with_the_given_weights(subject):
    model, expected = build(subject), build(subject)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    functional_call(model, weights, (tokens(),)).sin().square().sum().backward()
    for name, grad in gradients(expected, expected(tokens())).items():
        torch.testing.assert_close(weights[name].grad, grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_of(SUBJECTS)
def test_low_precision_stays_near(subject, dtype):
    """In autocast and with cast weights; of projections the error is at most twice that of plain ones."""
    exact = build(subject).eval()
    cast, autocast = copy.deepcopy(exact).to(dtype), copy.deepcopy(exact).float()
    x = tokens()
    stock = Attention().to(dtype)
    plain = (stock(x.to(dtype)).double() - Attention()(x)).norm() / Attention()(x).norm()
    for model in (cast, autocast):
        refresh_corrections(model, updates=0)
        with torch.autocast("cpu", dtype, enabled=model is autocast):
            y = model(x.to(next(model.parameters()).dtype))
        grads = gradients(model, y.float())
        assert y.dtype == dtype and y.isfinite().all()
        assert all(
            grads[name].dtype == p.dtype and grads[name].isfinite().all() for name, p in model.named_parameters()
        )
        if subject in EVERY and ("Polar" in subject["type"] or "SVD" in subject["type"]):
            exact = copy.deepcopy(model).double()  # C follows from the W that there is
            refresh_corrections(exact, updates=0)
        error = (y.double() - exact(x)).norm() / exact(x).norm()
        assert error < (2 * plain if subject in EVERY else 0.03)


@each_of([*PLAIN, Caller, Reader, Both, Aliasing, dict(type="dark"), dict(type="learned"), dict(type="uniform")])
def test_training_compiles_without_a_graph_break(subject):
    eager, compiled = build(subject, torch.float32), build(subject, torch.float32)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    x = tokens(torch.float32)
    if subject in EVERY:  # of which the fused projection has all there is
        eager, run = eager.qkv, torch.compile(compiled.qkv, fullgraph=True, backend="aot_eager")
        compiled = compiled.qkv
    grads, expected = gradients(compiled, run(x)), gradients(eager, eager(x))
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5)
    for name, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(name))


@each_of([Caller, Reader, Both, Aliasing, dict(type="OrthogonalInit", gain=0.5), *EVERY[-6:-4]])
def test_a_traced_graph_trains_w_and_keeps_c(subject):
    model = build(subject)
    graph = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(graph(tokens()), model(tokens()), rtol=1e-12, atol=1e-12)
    grads = [gradients(m, m(tokens())) for m in (graph, model)]
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, rtol=1e-11, atol=1e-12)


@each([cfg for cfg in EVERY if "SVD" in cfg["type"] or "Polar" in cfg["type"] or "S" in cfg["type"][:1]])
def test_what_follows_from_w_is_not_traced(cfg):
    with pytest.raises(TypeError, match=cfg["type"]):
        torch.fx.symbolic_trace(build(cfg))

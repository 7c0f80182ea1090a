"""Every conditioning, every way in which attention reads its weights, and every kernel, run in every way."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import mmspectral
from mmspectral.layers import DarkAttention, DerivedCorrection, refresh_corrections
from tests.test_layers.test_kernels import TYPES
from tests.test_layers.test_projection import EVERY, HEADS, Attention, E, same_state, tokens, train
from tests.test_layers.test_surgery import Aliasing, Both, Caller, Last, Reader, Recomputing


def build(subject, dtype=torch.float64):
    """Return a conditioning on fused and separate projections, an owner whose weight is W + C, or a kernel's layer."""
    torch.manual_seed(0)
    if isinstance(subject, type):
        rows = dict(row_order="[3][heads][d]", num_heads=HEADS)  # which cannot be found out on the meta device
        settings = dict(type="IdentityCorrection", preserve_norm=0.1)
        model = mmspectral.condition(nn.Sequential(subject()), settings, layout=rows)
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


@each_of(
    [*PLAIN, Caller, Reader, Both, Aliasing, *(dict(type=name) for name in ("dark", "learned", "constant", "uniform"))]
)
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


@each_of(SUBJECTS)
def test_a_traced_graph_follows_the_weights(subject):
    """A reader of a W + C that follows from W is refused; see test_surgery.py."""
    model = nn.Sequential(build(subject)).eval()
    graph = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    if subject is Recomputing:
        return
    torch.testing.assert_close(graph(tokens()), model(tokens()), rtol=1e-12, atol=1e-12)
    grads = [gradients(m, m(tokens())) for m in (graph, model)]
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, rtol=1e-11, atol=1e-12)


@each_of(SUBJECTS)
def test_trains_after_inference_mode_as_before(subject):
    model, fresh = build(subject), build(subject)
    with torch.inference_mode():
        model.eval()(tokens())
    expected = gradients(fresh, fresh.eval()(tokens()))
    for name, grad in gradients(model, model(tokens())).items():
        torch.testing.assert_close(grad, expected[name])


@each_of(SUBJECTS)
def test_a_file_is_assigned_to_what_was_built_without_memory(subject):
    source = build(subject)
    train([source], steps=1)
    state = source.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    with torch.device("meta"):
        model = build(subject)
    model.load_state_dict(state, assign=True)
    assert same_state(model, source) and all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    torch.testing.assert_close(model.eval()(tokens()), source.eval()(tokens()), rtol=0, atol=0)


@each_of(SUBJECTS)
def test_forward_mode_derivatives_are_right(subject):
    model, x, e = build(subject).eval(), tokens(), 1e-6
    direction = torch.randn_like(x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, tangent = torch.func.jvp(model, (x,), (direction,))
        difference = (model(x + e * direction) - model(x - e * direction)) / (2 * e)
    torch.testing.assert_close(tangent, difference, rtol=1e-5, atol=1e-6)


@each_of([subject for subject in SUBJECTS if subject is not Recomputing])  # torch.utils.checkpoint takes no transform
def test_gradients_by_sample_add_up(subject):
    model, x = build(subject).eval(), tokens()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, sample):
        return functional_call(model, weights, (sample[None],)).sin().square().sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for name, grad in gradients(model, model(x)).items():
        torch.testing.assert_close(by_sample[name].sum(0), grad)


PARAMETRIZED = (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
COMPUTED = (nn.utils.weight_norm, nn.utils.spectral_norm, lambda m: prune.l1_unstructured(m, "weight", 0.3))


@pytest.mark.parametrize("make", [*PARAMETRIZED, *COMPUTED])
@each_of([*EVERY, Caller, Reader])
def test_a_weight_that_is_computed_is_refused_by_name(subject, make):
    stock, stocks = nn.Sequential(Caller()), dict(type="IdentityCorrection") if isinstance(subject, type) else subject
    make(stock[0].qkv)
    with pytest.raises(ValueError, match=r"0\.qkv: its weight is computed"):
        mmspectral.condition(stock, stocks)
    model = mmspectral.condition(nn.Sequential((subject if isinstance(subject, type) else Caller)()), stocks).eval()
    refresh_corrections(model, updates=1)
    if make in PARAMETRIZED:
        with pytest.raises(TypeError, match=r"0\.qkv: a conditioned projection cannot be parametrised"):
            make(model[0].qkv)
            model(tokens(torch.float32))
    elif isinstance(subject, dict) and subject["type"] != "QKNorm":
        make(model[0].qkv)
        y = model(tokens(torch.float32))
        torch.testing.assert_close(mmspectral.fold(model)(tokens(torch.float32)), y, rtol=1e-4, atol=1e-4)

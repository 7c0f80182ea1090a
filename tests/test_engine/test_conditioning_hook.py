"""ConditioningHook in real runs: its numbers against independent ones, and that it changes nothing."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import nn

from mmspectral.engine.hooks import ConditioningHook
from mmspectral.registry import HOOKS

IDENTITY = dict(type="IdentityCorrection", scale=10.0)
QKV = "backbone.xca_layers.0.attn.qkv"


@pytest.fixture
def lines_of(make_runner, images, logged):
    """Return a function that trains with a hook for some batches and returns the logged lines."""

    def run(model, batches, hook, *args, **kwargs):
        runner = make_runner(model, images(batches), [hook], *args, **kwargs)
        runner.train()
        return logged(runner)

    return run


def kappa(matrix):
    return torch.linalg.cond(matrix.double()).item()


def merged(lines, step):
    return {key: value for line in lines if line["step"] == step for key, value in line.items()}


def test_spectra_are_those_of_the_weights_before_training_and_after_every_nth_iteration(
    classifier, make_runner, images, logged
):
    model = classifier(IDENTITY)
    start = model.get_parameter(f"{QKV}.weight").detach().clone()
    hook = HOOKS.build(dict(type="mmspectral.ConditioningHook", interval=2, statistics=["spectrum"]))
    runner = make_runner(model, images(5), [hook])
    runner.train()
    lines = logged(runner)
    assert [line["step"] for line in lines] == [0, 2, 4]
    fourth = torch.load(f"{runner.work_dir}/iter_4.pth", weights_only=False)["state_dict"][f"{QKV}.weight"]
    for line, weight in ((lines[0], start), (lines[2], fourth)):
        for p, role in enumerate("qkv"):
            matrix = weight.view(3, 16, 16)[p].double()
            sigma = torch.linalg.svdvals(matrix)
            name = f"conditioning/{QKV}/{role}"
            assert line[f"{name}/sigma_max_before"] == pytest.approx(sigma[0].item(), rel=1e-9)
            assert line[f"{name}/sigma_min_before"] == pytest.approx(sigma[-1].item(), rel=1e-9)
            assert line[f"{name}/kappa_before"] == pytest.approx(kappa(matrix), rel=1e-9)
            assert line[f"{name}/kappa_after"] == pytest.approx(kappa(matrix + 10 * torch.eye(16)), rel=1e-9)
            assert line[f"{name}/rank_deficient_before"] == line[f"{name}/rank_deficient_after"] == 0
    assert runner.message_hub.get_scalar("train/kappa_max").current() == max(
        value for name, value in lines[2].items() if name.endswith("kappa_after")
    )
    assert runner.message_hub.get_scalar("train/rank_deficient").current() == 0


def test_attention_is_measured_on_the_tokens_of_the_forward_pass(classifier, lines_of):
    model = classifier(dict(type="IdentityCorrection", scale=0.3), with_cp=True)
    layer = model.backbone.xca_layers[1].attn
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append((copy.deepcopy(module.qkv), args[0].detach())))
    (line,) = lines_of(model, 3, ConditioningHook(interval=2, layers=r"xca_layers\.1", statistics=["attention"]))
    qkv, x = seen[2]  # two passes per iteration: gradient checkpointing runs the second one again
    q, k, _ = qkv(x).detach().double().reshape(2, 12, 3, 2, 8).permute(2, 0, 3, 4, 1)  # [B, h, d, N]
    q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
    logits = q @ k.mT * layer.temperature.detach().double()
    attention = logits.softmax(-1)
    entropy = -(attention * attention.log()).sum(-1).mean().item()
    name = "conditioning/backbone.xca_layers.1.attn"
    assert line["step"] == 2
    assert line[f"{name}/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert line[f"{name}/relative_entropy"] == pytest.approx(entropy / math.log(8), rel=1e-5)
    # The temperature moved by one update since.
    assert line[f"{name}/largest_logit"] == pytest.approx(logits.abs().max().item(), rel=1e-2)
    assert not [key for key in line if "xca_layers.0" in key or "kappa" in key]


def test_gradients_are_those_of_the_next_update_under_accumulation(classifier, lines_of):
    model = classifier(IDENTITY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = model.get_parameter(f"{QKV}.weight")
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))
    hook = ConditioningHook(interval=3, max_layers=1, statistics=["gradient"])
    wrapper = OptimWrapper(optimizer, accumulative_counts=2, clip_grad=dict(max_norm=0.1))
    (line,) = lines_of(model, 4, hook, wrapper)
    assert line["step"] == 4 and len(seen) == 2
    for p, role in enumerate("qkv"):
        expected = seen[1][16 * p : 16 * p + 16].norm().item()
        assert line[f"conditioning/{QKV}/{role}/grad_norm"] == pytest.approx(expected, rel=1e-5)
    assert len(optimizer._optimizer_step_pre_hooks) == 1  # the test's own


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_under_a_loss_scaler_are_unscaled(classifier, lines_of, cpu_amp, fused):
    norms = []
    for scale in (1.0, 4096.0):
        model = classifier(IDENTITY)
        wrapper = cpu_amp(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), init_scale=scale)
        lines = lines_of(model, 1, ConditioningHook(interval=1, statistics=["gradient"]), wrapper)
        norms.append(lines[-1][f"conditioning/{QKV}/v/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and norms[0] > 0


def test_rank_deficient_and_what_is_not_finite_are_flags_and_no_numbers(classifier, lines_of):
    model = classifier(IDENTITY)
    weight = model.get_parameter(f"{QKV}.weight")
    with torch.no_grad():
        weight[:16] = 0.5
    weight.register_hook(lambda grad: grad * torch.inf)
    lines = lines_of(model, 2, ConditioningHook(interval=2, max_layers=1), lr=0.0)
    line = merged(lines, 0)
    assert line[f"conditioning/{QKV}/q/rank_deficient_before"] == 1
    assert f"conditioning/{QKV}/q/kappa_before" not in line
    assert line[f"conditioning/{QKV}/q/kappa_after"] == pytest.approx(1.8)  # 0.5 * ones has the eigenvalues 8 and 0
    assert line[f"conditioning/{QKV}/k/rank_deficient_before"] == 0
    line = merged(lines, 2)
    assert line[f"conditioning/{QKV}/q/grad_norm_non_finite"] == 1
    assert f"conditioning/{QKV}/q/grad_norm" not in line
    assert line[f"conditioning/{QKV}/q/kappa_after_non_finite"] == 1  # 0 * inf is nan
    assert f"conditioning/{QKV}/q/rank_deficient_after" in line


def test_stock_twin_logs_the_same_names(classifier, lines_of):
    ours, twin = (merged(lines_of(classifier(c), 1, ConditioningHook(interval=1)), 1) for c in (IDENTITY, None))
    assert ours.keys() == twin.keys()
    before = {name: value for name, value in twin.items() if name.endswith("_before")}
    assert before and all(twin[name.replace("_before", "_after")] == value for name, value in before.items())
    assert any("ca_layers.0.attn.q/q/" in name for name in ours)


def test_training_is_bit_equal_with_and_without_the_hook(classifier, make_runner, images):
    states = []
    for hooks in ([ConditioningHook(interval=1)], []):
        model = classifier(IDENTITY, drop_rate=0.1, drop_path_rate=0.1)
        make_runner(model, images(3), hooks).train()
        states.append(model.state_dict())
        assert not any(module._forward_pre_hooks for module in model.backbone.xca_layers.modules())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


@pytest.mark.parametrize("precision", ["cast", "autocast"])
def test_low_precision(classifier, lines_of, cpu_amp, precision):
    """bfloat16 weights are decomposed too."""
    model = classifier(IDENTITY)
    if precision == "cast":
        model = model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapper = cpu_amp(optimizer) if precision == "autocast" else OptimWrapper(optimizer)
    expected = kappa(model.get_parameter(f"{QKV}.weight")[:16])
    lines = lines_of(model, 1, ConditioningHook(interval=1), wrapper)
    assert merged(lines, 0)[f"conditioning/{QKV}/q/kappa_before"] == pytest.approx(expected, rel=1e-9)
    line = merged(lines, 1)
    assert line[f"conditioning/{QKV}/q/grad_norm"] > 0
    assert 0.9 < line["conditioning/backbone.xca_layers.0.attn/relative_entropy"] <= 1
    assert not any("non_finite" in name for name in line)


def test_names_are_those_of_the_model_inside_a_wrapper(classifier, lines_of, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = MMDistributedDataParallel(classifier(IDENTITY))
        line = merged(lines_of(model, 1, ConditioningHook(interval=1, max_layers=1)), 1)
    finally:
        dist.destroy_process_group()
    assert line[f"conditioning/{QKV}/q/grad_norm"] > 0
    assert "conditioning/backbone.xca_layers.0.attn/entropy" in line


def test_by_epoch_measures_the_last_iteration_of_layers_spread_over_those_named(classifier, lines_of):
    hook = ConditioningHook(interval=2, by_epoch=True, max_layers=2, layers="xca_")
    lines = lines_of(classifier(), 2, hook, epochs=2)
    assert {line["step"] for line in lines} == {0, 4}
    names = {name.split("/")[1] for name in lines[0] if "/q/" in name}
    assert names == {QKV, "backbone.xca_layers.2.attn.qkv"}


@pytest.mark.parametrize("max_tokens", [5, 12])
def test_long_sequences_are_thinned_only_where_attention_is_among_tokens(max_tokens):
    class AmongTokens(nn.Module):
        def attention_logits(self, x):
            return x @ x.mT

    class AmongChannels(nn.Module):
        def attention_logits(self, x):
            return x.mT @ x

    hook = ConditioningHook(max_samples=2, max_tokens=max_tokens)
    x = torch.randn(5, 12, 3)
    assert torch.equal(hook._part(AmongChannels(), x), x[::3])
    assert torch.equal(hook._part(AmongTokens(), x), x[::3, ::3] if max_tokens == 5 else x[::3])


@pytest.mark.parametrize(
    "settings", [dict(interval=0), dict(max_layers=1.5), dict(statistics="spectrum"), dict(statistics=["kappa"])]
)
def test_wrong_settings(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
        ConditioningHook(**settings)


def test_a_model_with_nothing_to_measure_is_an_error(classifier, lines_of):
    with pytest.raises(ValueError, match="no attention layer matches layers='swin'; there are backbone.xca_layers.0"):
        lines_of(classifier(), 1, ConditioningHook(layers="swin"))
    with pytest.raises(ValueError, match="Linear has no attention layer that can be measured"):
        ConditioningHook()._choose(nn.Linear(2, 2))

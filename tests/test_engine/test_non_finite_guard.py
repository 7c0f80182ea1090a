"""NonFiniteGuardHook stops real runs with the weights they had."""

from pathlib import Path

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict

from mmspectral.engine.hooks import NonFiniteGuardHook

IDENTITY = dict(type="IdentityCorrection", scale=10.0)
STEM = "backbone.patch_embed.proj.0.conv"


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(model, before):
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def fail(runner, match):
    with pytest.raises(FloatingPointError, match=match) as caught:
        runner.train()
    return str(caught.value)


def test_a_nan_image_stops_the_run_before_the_update(classifier, make_runner, images):
    batches = images(4)
    batches[2, 1, 0, 3, 3] = torch.nan
    model = classifier(IDENTITY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    runner = make_runner(model, batches, [dict(type="mmspectral.NonFiniteGuardHook")], OptimWrapper(optimizer))
    message = fail(runner, "iteration 3: loss is nan")
    assert f"First layer with such an output: {STEM}." in message
    assert "The batch itself holds values that are not finite." in message
    assert "Largest attention logit" in message and " in backbone.xca_layers." in message
    assert "Largest condition number of a projection in use:" in message
    work_dir = Path(runner.work_dir)
    assert f"Last checkpoint: {work_dir / 'iter_2.pth'}." in message
    assert sorted(path.name for path in work_dir.glob("*.pth")) == ["iter_1.pth", "iter_2.pth"]
    checkpoint = torch.load(work_dir / "iter_2.pth", weights_only=False)
    assert_equal(model, checkpoint["state_dict"])
    state = optimizer.state_dict()["state"]
    for index, saved in checkpoint["optimizer"]["state"].items():
        assert all(torch.equal(state[index][key], value) for key, value in saved.items())
    classifier(IDENTITY).load_state_dict(checkpoint["state_dict"], strict=True)
    assert not optimizer._optimizer_step_pre_hooks and not model._forward_hooks


def test_a_gradient_that_is_not_finite_is_found_behind_clipping(classifier, make_runner, images):
    model = classifier(IDENTITY, trouble=lambda features, inputs: features + (features * 0).square().sum().sqrt())
    before = parameters(model)
    hook = NonFiniteGuardHook()
    message = fail(make_runner(model, images(1), [hook], clip_grad=dict(max_norm=1.0)), "iteration 1: the gradients of")
    assert "from the loss back, with a gradient that is not: backbone.norm.bias." in message
    assert "The forward pass is finite" in message and "There is no checkpoint yet." in message
    assert_equal(model, before)


def test_a_loss_that_is_not_finite_stops_though_all_gradients_are(classifier, tiny_classifier, make_runner, images):
    class WithConstant(tiny_classifier):
        def forward(self, *args, **kwargs):
            losses = super().forward(*args, **kwargs)
            return dict(losses, loss_aux=[torch.tensor(1.0), torch.tensor(torch.inf)], accuracy=torch.tensor(torch.nan))

    model = classifier(IDENTITY, kind=WithConstant)
    before = parameters(model)
    fail(make_runner(model, images(1), [NonFiniteGuardHook()]), r"loss_aux\[1\] is inf\. ")
    assert_equal(model, before)


def test_only_what_is_not_finite_stops(classifier, make_runner, images):
    """A logged value may be nan, and the norm of finite gradients may overflow."""
    model = classifier()
    model.head.bias.register_hook(lambda grad: torch.full_like(grad, 1e30))
    hook = NonFiniteGuardHook()
    make_runner(model, images(2), [hook], lr=0.0).train()
    assert not hook._handles and not model._forward_hooks


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_accumulation_names_the_failed_batch(classifier, make_runner, images, bad):
    batches = images(4)
    batches[bad] = torch.nan
    model = classifier()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    runner = make_runner(model, batches, [NonFiniteGuardHook()], wrapper)
    message = fail(runner, f"iteration {bad + 1}: loss is nan")
    assert STEM in message
    before = classifier().state_dict() if bad < 2 else torch.load(f"{runner.work_dir}/iter_2.pth", weights_only=False)
    assert_equal(model, before.get("state_dict", before))


def two_optimizers(classifier, tiny_classifier, wrapper):
    """Return a model whose head and backbone have an optimizer each, and these; the backbone's accumulates."""

    class Two(tiny_classifier):
        def train_step(self, data, optim_wrapper):
            data = self.data_preprocessor(data, True)
            for name in ("head", "backbone"):
                loss = self(**data, mode="loss")["loss"]
                optim_wrapper[name].update_params(loss)
            return dict(loss=loss)

    model = classifier(kind=Two)
    optimizers = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in ("head", "backbone")}
    wrappers = dict(head=wrapper(optimizers["head"]), backbone=wrapper(optimizers["backbone"], accumulative_counts=2))
    return model, OptimWrapperDict(**wrappers)


def test_each_of_several_optimizers_is_guarded(classifier, tiny_classifier, make_runner, images):
    model, wrappers = two_optimizers(classifier, tiny_classifier, OptimWrapper)
    make_runner(model, images(2), [NonFiniteGuardHook()], wrappers).train()

    model, wrappers = two_optimizers(classifier, tiny_classifier, OptimWrapper)
    model.get_parameter("backbone.xca_layers.1.attn.qkv.weight").register_hook(lambda grad: grad * torch.nan)
    before = parameters(model.backbone)
    fail(make_runner(model, images(2), [NonFiniteGuardHook()], wrappers), "iteration 1: the gradients of 1 of")
    assert_equal(model.backbone, before)


def overflow(model, iterations):
    """Make one gradient infinite in the given iterations, counted from 0."""
    calls = iter(range(99))
    weight = model.get_parameter("backbone.xca_layers.1.attn.qkv.weight")
    weight.register_hook(lambda grad: grad * torch.inf if next(calls) in iterations else grad)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_updates_in_a_row_under_a_loss_scaler(classifier, make_runner, images, cpu_amp, fused):
    model = classifier(IDENTITY)
    overflow(model, {0, 1, 3, 4, 5, 6, 7})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    runner = make_runner(model, images(8), [NonFiniteGuardHook(max_skipped=3)], cpu_amp(optimizer))
    message = fail(runner, "iteration 6: 3 updates in a row were skipped")
    assert "loss scale now 32" in message  # 1024, halved five times
    assert "a gradient that is not: backbone.xca_layers.1.attn.qkv.weight." in message
    assert_equal(model, torch.load(f"{runner.work_dir}/iter_5.pth", weights_only=False)["state_dict"])


def test_a_collapsing_loss_scale(classifier, make_runner, images, cpu_amp):
    model = classifier()
    overflow(model, {0, 1, 2})
    before = parameters(model)
    wrapper = cpu_amp(torch.optim.SGD(model.parameters(), lr=0.1), init_scale=2.0)
    fail(make_runner(model, images(3), [NonFiniteGuardHook()], wrapper), "iteration 2: the loss scale fell to 0.5")
    assert_equal(model, before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_loss_under_a_loss_scaler_stops_at_once(classifier, make_runner, images, cpu_amp, fused):
    batches = images(3)
    batches[0] = torch.nan
    model = classifier(IDENTITY)
    before = parameters(model)
    wrapper = cpu_amp(torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
    message = fail(make_runner(model, batches, [NonFiniteGuardHook()], wrapper), "iteration 1: loss is nan")
    assert STEM in message
    assert_equal(model, before)


def test_accumulation_and_optimizers_that_wait_do_not_count_as_skipped(
    classifier, tiny_classifier, make_runner, images, cpu_amp
):
    model, wrappers = two_optimizers(classifier, tiny_classifier, cpu_amp)
    make_runner(model, images(4), [NonFiniteGuardHook(max_skipped=1)], wrappers).train()


def test_a_weight_that_was_bad_from_the_start_is_named(classifier, make_runner, images):
    model = classifier(IDENTITY)
    with torch.no_grad():
        model.backbone.xca_layers[1].attn.qkv.weight[0, 0] = torch.inf
    message = fail(make_runner(model, images(1), [NonFiniteGuardHook()]), "loss is nan")
    assert "Parameters that are not finite: backbone.xca_layers.1.attn.qkv.weight (1 in all)." in message
    assert "First layer with such an output: backbone.xca_layers.1.attn.qkv." in message
    assert "in backbone.xca_layers.0.attn" in message


def test_the_diagnosis_never_hides_the_stop(classifier, make_runner, images):
    calls = iter(range(9))

    def once(features, inputs):
        if next(calls):
            raise RuntimeError("out of memory")
        return features * torch.nan

    model = classifier(trouble=once)
    message = fail(make_runner(model, images(1), [NonFiniteGuardHook()]), "loss is nan")
    assert "Repeating the batch raised RuntimeError: out of memory." in message


@pytest.mark.parametrize("max_skipped", [0, 1.5])
def test_settings(max_skipped):
    with pytest.raises(ValueError, match="max_skipped must be a positive integer"):
        NonFiniteGuardHook(max_skipped)

"""torch.compile of the train step for one config of each family: one graph per backbone, the losses of eager mode."""

import copy

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from mmpretrain.structures import DataSample

from mmspectral.engine.runner.config import read_config

VIT = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=32)
# Shipped configs, cut to a size that compiles in seconds: arch of the backbone and channels of the head.
FAMILIES = {
    "xcit/spectral-xcit-tiny-12-p16_8xb128_in1k.py": (dict(embed_dims=16, depth=1, num_heads=2), 16),
    "swin/spectral-swin-tiny_16xb64_in1k.py": (dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2]), 32),
    "vit/spectral-vit-tiny-p16_32xb128_in1k.py": (VIT, 16),
    "deit/spectral-deit-base-distilled_16xb64_in1k.py": (VIT, 16),
    "davit/spectral-davit-tiny_4xb256_in1k.py": (dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2]), 32),
}


def build(config):
    arch, channels = FAMILIES[config]
    cfg = read_config(f"mmspectral::{config}")
    cfg.model.backbone.update(arch=arch, drop_path_rate=0.0, out_indices=-1)
    cfg.model.head.update(in_channels=channels, num_classes=3)
    cfg.model.train_cfg = None  # Mixup and CutMix, which the data preprocessor does
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        return MODELS.build(cfg.model).double().train()


def train(model, step_backend=None):
    """Return the losses of two steps, of forward, backward and optimizer, and one more that shows the second."""
    # Not Adam: compiled, it takes its bias correction from a float32 count of steps, whatever the model is in.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = [DataSample().set_gt_label(i % 3) for i in range(4)]

    def step():
        loss = sum(model(images, samples, mode="loss").values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if step_backend:
        step = torch.compile(step, backend=step_backend)
    return torch.stack([step() for _ in range(3)])


@pytest.mark.parametrize(
    "config",
    [config if config.startswith("xcit") else pytest.param(config, marks=pytest.mark.slow) for config in FAMILIES],
)
def test_the_train_step_compiles_and_has_the_losses_of_eager_mode(config):
    torch._dynamo.reset()
    eager = build(config)
    compiled, whole = copy.deepcopy(eager), copy.deepcopy(eager)
    losses = train(eager)
    assert losses.unique().numel() == 3  # the steps move the weights
    # A break in the backbone is an error here; the heads of mmpretrain may have some.
    compiled.backbone.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(train(compiled), losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(train(whole, "aot_eager"), losses, rtol=1e-9, atol=1e-9)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(whole.get_parameter(name), parameter, rtol=1e-9, atol=1e-9)

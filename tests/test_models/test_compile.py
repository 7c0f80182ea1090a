"""torch.compile of the train step for one config of each family: the losses of eager mode."""

import copy

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from mmpretrain.structures import DataSample

from mmspectral.arguments import read_config
from mmspectral.layers import feature_kernels

VIT = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=32)
# Shipped configs, cut to a size that compiles in seconds: arch of the backbone and channels of the head.
FAMILIES = {
    "xcit/spectral-xcit-tiny-12-p16_8xb128_in1k.py": (dict(embed_dims=8, depth=1, cls_attn_layers=1, num_heads=2), 8),
    "swin/spectral-swin-tiny_16xb64_in1k.py": (dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2]), 32),
    "vit/spectral-vit-tiny-p16_32xb128_in1k.py": (VIT, 16),
    "deit/spectral-deit-base-distilled_16xb64_in1k.py": (VIT, 16),
    "davit/spectral-davit-tiny_4xb256_in1k.py": (dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2]), 32),
    "dark/dark-vit-base-p16_ft-30e_16xb32_in1k-384px.py": (VIT, 16),
    "dark/dark-deit-small_ft-30e_8xb128_in1k.py": (VIT, 16),
    "dark/mask-rcnn_dark-swin-t-p4_fpn_1x_coco.py": (dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2]), 32),
}
FAST = ("xcit/spectral-xcit-tiny-12-p16_8xb128_in1k.py", "dark/dark-vit-base-p16_ft-30e_16xb32_in1k-384px.py")


def build(config):
    arch, channels = FAMILIES[config]
    cfg = read_config(f"mmspectral::{config}")
    if "head" not in cfg.model:  # of a detector: its backbone in a classifier
        detector, cfg = cfg, read_config("mmspectral::swin/spectral-swin-tiny_16xb64_in1k.py")
        cfg.model.backbone = detector.model.backbone
    cfg.model.backbone.update(arch=arch, drop_path_rate=0.0, out_indices=-1)
    cfg.model.head.update(in_channels=channels, num_classes=3)
    cfg.model.train_cfg = None  # Mixup and CutMix, which the data preprocessor does
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        return MODELS.build(cfg.model).double().train()


def train(model, step_backend=None):
    """Return the losses of two steps, of forward, backward and optimizer, and one more that shows the second.

    Random features are drawn anew before each but the first.
    """
    # Not Adam: compiled, it takes its bias correction from a float32 count of steps, whatever the model is in.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = [DataSample().set_gt_label(i % 3) for i in range(4)]

    def step():
        loss = sum(model(images, samples, mode="loss").values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if step_backend:
        step = torch.compile(step, backend=step_backend)
    losses = []
    for counter in range(3):
        for kernel in feature_kernels(model).values():
            kernel.redraw(counter)
        losses.append(step())
    return torch.stack(losses)


def assert_parameters_close(ours, others, tolerance):
    for name, parameter in others.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "config", [config if config in FAST else pytest.param(config, marks=pytest.mark.slow) for config in FAMILIES]
)
def test_the_train_step_compiles_and_has_the_losses_of_eager_mode(config):
    """That no backbone breaks the graph is in test_backbones.py; the heads of mmpretrain may."""
    eager = build(config)
    compiled = copy.deepcopy(eager)
    losses = train(eager)
    assert losses.unique().numel() == 3  # steps move the weights, and draws change
    torch.testing.assert_close(train(compiled, "aot_eager"), losses, rtol=1e-9, atol=1e-9)
    assert_parameters_close(compiled, eager, 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", FAMILIES)
def test_code_of_the_default_backend_has_the_losses_of_eager_mode(config):
    # XCiT's position encoding is in float32, also in a float64 model, and inductor's sines end in other bits.
    tolerance = 1e-7 if config.startswith("xcit") else 1e-10
    eager = build(config)
    compiled = copy.deepcopy(eager)
    torch.testing.assert_close(train(compiled, "inductor"), train(eager), rtol=tolerance, atol=tolerance)
    assert_parameters_close(compiled, eager, tolerance)

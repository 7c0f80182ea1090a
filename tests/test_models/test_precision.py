"""Every backbone and the quick-start detectors in half precision, beside mmpretrain's own with the same weights."""

import copy

import pytest
import torch
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner

from mmspectral.analysis.stock_twins import FAMILIES, DenseBackbone
from mmspectral.arguments import read_config
from mmspectral.compat import mmcv_ops_backend
from mmspectral.models import DarkDeiT, DarkSwin, DarkViT

SIZE = (64, 96)
STAGES = dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4])
PLAIN = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64)
ARCHS = dict(xcit=dict(embed_dims=32, depth=2, num_heads=4), swin=STAGES, vit=PLAIN, deit=PLAIN, davit=STAGES)
DARK = dict(dark_vit=DarkViT, dark_deit=DarkDeiT, dark_swin=DarkSwin)
KERNEL = dict(type="dark", num_features=16, proposal="sharp", shift="learned")
EACH = pytest.mark.parametrize("name", [*ARCHS, *DARK])
DETECTORS = [
    "quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py",
    "quickstart/mask-rcnn_spectral-swin-d48_fpn_shapes.py",
    "dark/mask-rcnn_dark-vit-d128-p8_fpn_shapes.py",
]


def build_pair(name):
    """Return ours, conditioned with the family's lambda, and mmpretrain's softmax backbone with weights W + C."""
    torch.manual_seed(0)
    key = name.removeprefix("dark_")
    # DARK at lambda = 1 has sharper attention than the twin's windows: its gradients err more in any implementation.
    conditioning = dict(type="IdentityCorrection", scale=dict(xcit=10.0).get(name, 0.5 if name in DARK else 1.0))
    backbone = DenseBackbone(key, ARCHS[key], SIZE)
    softmax = backbone.conditioned(conditioning)
    ours = copy.deepcopy(softmax)
    if name in DARK:
        family = FAMILIES[key]
        settings = family.shared | family.own | ({"img_size": SIZE} if family.takes else {})
        ours = DARK[name](ARCHS[key], kernel=KERNEL, conditioning=conditioning, **settings)
        ours.load_state_dict(softmax.state_dict(), strict=False)
    return ours, backbone.folded(softmax)


def images(size=1.0):
    return size * (2 * torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(1)) - 1)


def forward(model, x, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.cat([out.float().flatten() for out in model(x)])


def gradients(model, x, autocast):
    model.zero_grad()
    out = forward(model, x, autocast)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def relative_error(low, exact):
    return (low - exact).norm() / exact.norm()


@EACH
def test_bfloat16_autocast_errs_at_most_twice_as_much_as_stock(name):
    """Outputs in evaluation and gradients in training, which all parameters get; against float32."""
    x, pair, errors = images(), build_pair(name), []
    ours, stock = (dict(model.named_parameters()) for model in pair)
    shared = [n for n, p in stock.items() if p.requires_grad and n in ours]
    for model in pair:
        model.eval()  # mmpretrain's Swin returns None
        with torch.no_grad():
            outputs = relative_error(forward(model, x, True), forward(model, x, False))
        model.train()
        low, exact = (gradients(model, x, autocast) for autocast in (True, False))
        assert [n for n, grad in low.items() if grad is None or not grad.isfinite().all()] == []
        flat = (torch.cat([grads[n].flatten() for n in shared]) for grads in (low, exact))
        errors.append(torch.stack([outputs, relative_error(*flat)]))
    ours, stock = errors
    assert (stock > 1e-3).all() and (ours <= 2 * stock).all(), errors


@EACH
def test_float16_weights_in_evaluation(name):
    """Images of entries up to 1 and up to 1e4, near float32."""
    ours = build_pair(name)[0].eval()
    cast = copy.deepcopy(ours).half()
    for size in (1.0, 1e4):
        x = images(size)
        with torch.no_grad():
            assert all(out.dtype == torch.float16 for out in cast(x.half()))
            assert relative_error(forward(cast, x.half(), False), forward(ours, x, False)) < 5e-3


@EACH
def test_large_queries_and_keys_stay_finite(name):
    """Q and k times 1e2 and 1e4, in bfloat16 autocast forward and backward, and with float16 weights."""
    ours, x = build_pair(name)[0], images()
    for _ in range(2):
        for module_name, module in ours.named_modules():
            if module_name.endswith("qkv"):
                module.weight.data[: -module.in_features] *= 1e2
        assert forward(ours.train(), x, True).isfinite().all()
        assert [n for n, grad in gradients(ours, x, True).items() if not grad.isfinite().all()] == []
        with torch.no_grad():
            assert forward(copy.deepcopy(ours).eval().half(), x.half(), False).isfinite().all()


@EACH
def test_the_meta_device_gives_the_shapes(name):
    """Without memory or time, as counters of parameters and products use it; autocast does not know that device."""
    ours, x = build_pair(name)[0], images()
    expected = [out.shape for out in ours(x)]
    outputs = ours.to("meta")(x.to("meta"))
    assert [out.shape for out in outputs] == expected
    sum(out.sum() for out in outputs).backward()
    assert all(p.grad.is_meta for p in ours.parameters() if p.requires_grad)


def build_detector(config):
    """Return the model of a config and a batch of two images."""
    cfg = read_config(f"mmspectral::{config}")
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
    cfg.train_dataloader.dataset.num_images = 2
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        return MODELS.build(cfg.model), next(iter(Runner.build_dataloader(cfg.train_dataloader, seed=0)))


@pytest.mark.skipif(mmcv_ops_backend() == "compiled", reason="mmcv's compiled NMS takes float32 alone on the CPU")
@pytest.mark.parametrize("config", DETECTORS)
def test_a_detector_trains_and_predicts_under_autocast(config):
    """Losses, gradients and an update, then predictions with non-maximum suppression and masks."""
    model, batch = build_detector(config)
    model.train()
    data = model.data_preprocessor(batch, training=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model.parse_losses(model(**data, mode="loss"))
    loss.backward()
    assert loss.isfinite()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        predictions = model.test_step(batch)
    for instances in (sample.pred_instances for sample in predictions):
        assert len(instances.masks) == len(instances.bboxes) > 0
        assert instances.bboxes.isfinite().all() and instances.scores.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("config", DETECTORS)
def test_a_detector_trains_with_loss_scaling(config, dtype):
    model, batch = build_detector(config)
    model.cuda().train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapper = AmpOptimWrapper(loss_scale=dict(init_scale=1024.0), dtype=dtype, optimizer=optimizer)
    logs = [model.train_step(batch, wrapper) for _ in range(5)]
    assert all(log["loss"].isfinite() for log in logs)
    assert wrapper.loss_scaler.get_scale() > 1
    assert [n for n, p in model.named_parameters() if not p.isfinite().all()] == []
    assert [n for n, p in model.backbone.named_parameters() if p.equal(before[f"backbone.{n}"])] == []

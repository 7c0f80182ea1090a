"""export.py: any batch and image size, equal to eager mode, or refused; folded, whole or not at all."""

import importlib.util

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmspectral.apis import export, exporter
from mmspectral.arguments import read_config
from mmspectral.errors import UsageError
from mmspectral.layers import ConditionedLinear, DarkAttention
from mmspectral.ops.random_features import PLAIN_OPERATORS
from tests.helpers import QUICKSTART

IDENTITY = dict(type="IdentityCorrection", scale=0.5)
VIT = dict(
    arch=dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=32),
    img_size=64,
    patch_size=8,
    conditioning=IDENTITY,
)
SWIN = dict(
    type="mmspectral.SpectralSwin",
    arch=dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2]),
    window_size=4,
    conditioning=IDENTITY,
)
XCIT = dict(
    type="mmspectral.SpectralXCiT",
    arch=dict(embed_dims=16, depth=1, num_heads=2),
    patch_size=8,
    conditioning=IDENTITY,
    class_attention_conditioning=IDENTITY,
)
BACKBONES = {
    "xcit": XCIT,
    "swin": SWIN,
    "swin-dense": dict(SWIN, out_indices=(0, 1)),
    "vit": dict(type="mmspectral.SpectralViT", **VIT),
    "vit-dense": dict(type="mmspectral.SpectralViT", out_type="featmap", **VIT),
    "deit": dict(type="mmspectral.SpectralDeiT", distillation=True, **VIT),
    "davit": dict(
        type="mmspectral.SpectralDaViT",
        arch=dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2]),
        window_size=4,
        conditioning=IDENTITY,
        channel_conditioning=dict(IDENTITY, targets=("q",)),
    ),
}
DARK = dict(type="dark", num_features=8)
BACKBONES["dark-vit"] = dict(BACKBONES["vit"], type="mmspectral.DarkViT", kernel=DARK)
BACKBONES["dark-swin"] = dict(SWIN, type="mmspectral.DarkSwin", kernel=DARK, out_indices=(0, 1))
# On 16 x 16 Swin's first map is one window and its second is smaller.
SIZES = [(2, 64, 96), (2, 70, 90), (1, 64, 64), (1, 16, 16), (3, 33, 120)]
ONNX = pytest.param(
    "onnx",
    marks=pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
        reason="onnx, onnxruntime or onnxscript is not installed",
    ),
)


def classifier(name):
    staged = name in ("swin", "davit")
    head = dict(type="DeiTClsHead" if name == "deit" else "LinearClsHead", num_classes=3, in_channels=16 << staged)
    neck = dict(type="GlobalAveragePooling") if staged else None
    model = dict(type="ImageClassifier", backbone=BACKBONES[name], neck=neck, head=head)
    return Config(dict(default_scope="mmpretrain", model=model))


def make(cfg, folder):
    """Return a model with random weights, also where they start as zeros or ones, and its checkpoint."""
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    torch.save(dict(state_dict=model.state_dict()), folder / "model.pth")
    return model, str(folder / "model.pth")


def load(file):
    if file.suffix == ".pt2":
        return torch.export.load(file).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda x: [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def flat(outputs):
    return torch.utils._pytree.tree_leaves(outputs)


@pytest.mark.parametrize(
    ("name", "part", "file_format"),
    [
        ("xcit", "model", "exported-program"),
        pytest.param("xcit", "model", *ONNX.values, marks=ONNX.marks),
        *(
            pytest.param(name, part, *form.values, marks=[*form.marks, pytest.mark.slow])
            for form in (pytest.param("exported-program"), ONNX)
            for name, part in [
                ("swin", "model"),
                ("swin-dense", "backbone"),
                ("vit", "model"),
                ("vit-dense", "backbone"),
                ("deit", "model"),
                ("davit", "backbone"),
                ("dark-vit", "model"),
                ("dark-swin", "backbone"),
            ]
        ),
    ],
)
@torch.no_grad()
def test_every_family_takes_any_batch_and_size(name, part, file_format, tmp_path):
    cfg = classifier(name)
    model, checkpoint = make(cfg, tmp_path)
    target = tmp_path / "new" / f"model{exporter.SUFFIXES[file_format]}"
    report = export(cfg, checkpoint, target, file_format, part, size=(64, 64))
    assert list(report.differences) == [(2, 3, 64, 64), (1, 3, 64, 64), (2, 3, 134, 154)]
    run = load(target)
    for B, H, W in SIZES:
        x = torch.randn(B, 3, H, W)
        outputs, expected = flat(run(x)), flat((model if part == "model" else model.backbone)(x))
        assert any(y.std() > 0.1 for y in expected)
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(*ONNX.marks[0].args, **ONNX.marks[0].kwargs)
@pytest.mark.parametrize("features", [64, 128])
@torch.no_grad()
def test_attention_over_random_features_as_onnx(features, tmp_path):
    """A mask, grouped queries, a shift and a proposal, at two lengths and batches."""
    layer = DarkAttention(
        32, 4, num_kv_heads=2, kernel=dict(type="dark", num_features=features, proposal="sharp", shift="learned")
    )
    nn.init.normal_(layer.kernel.shift)
    layer.kernel.proposal_variance.fill_(1.3)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}

    def export_to(file, x, mask, **settings):
        arguments = dict(x=x, attn_mask=mask, **settings)
        shapes = dict(x=free, attn_mask=free, **dict.fromkeys(settings))
        program = torch.export.export(layer, (), arguments, dynamic_shapes=shapes, strict=False)
        torch.onnx.export(program.run_decompositions(PLAIN_OPERATORS), dynamo=True, verbose=False).save(file)

    file = tmp_path / "layer.onnx"
    export_to(file, torch.randn(2, 30, 32), torch.rand(2, 30) > 0.3)
    session = pytest.importorskip("onnxruntime").InferenceSession(file.read_bytes())
    for B, N in ((2, 30), (3, 77)):
        x, mask = torch.randn(B, N, 32), torch.rand(B, N) > 0.3
        (out,) = session.run(None, dict(x=x.numpy(), attn_mask=mask.numpy()))
        torch.testing.assert_close(torch.from_numpy(out), layer(x, mask), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="causal"):
        export_to(file, torch.randn(2, 30, 32), torch.rand(2, 30) > 0.3, is_causal=True)


def test_a_fixed_size_takes_any_batch_and_refuses_other_sizes_and_weights_are_folded(tmp_path):
    cfg = classifier("xcit")
    model, checkpoint = make(cfg, tmp_path)
    report = export(cfg, checkpoint, tmp_path / "model.pt2", "exported-program", size=(16, 24), fixed_size=True)
    assert list(report.differences) == [(2, 3, 16, 24), (1, 3, 16, 24)]
    run = load(tmp_path / "model.pt2")
    x = torch.randn(5, 3, 16, 24)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match=r"size\(\)\[3\]|shape\[3\]"):
        run(torch.randn(1, 3, 16, 32))
    conditioned = {name: m for name, m in model.named_modules() if isinstance(m, ConditionedLinear)}
    assert len(conditioned) == 1 + 2 * 3
    for name, module in conditioned.items():
        assert torch.equal(run.get_parameter(f"{name}.weight"), module.effective_weight())


def test_a_difference_from_eager_mode_stops_the_export(tmp_path, monkeypatch):
    cfg = classifier("xcit")
    _, checkpoint = make(cfg, tmp_path)

    def fold_wrongly(model, keep):
        model.head.fc.bias.data += 0.01

    monkeypatch.setattr(exporter, "fold", fold_wrongly)
    target = tmp_path / "out" / "model.pt2"
    with pytest.raises(UsageError, match=r"differs by 1\.0e-02"):
        export(cfg, checkpoint, target, "exported-program", size=(16, 16), fixed_size=True)
    assert not target.parent.exists()


def test_weights_that_would_stay_random_are_refused(tmp_path):
    cfg = classifier("xcit")
    model, checkpoint = make(cfg, tmp_path)
    state = model.state_dict()
    for name, part in (("head.fc.bias", "model"), ("backbone.norm.bias", "backbone")):
        torch.save({key: value for key, value in state.items() if key != name}, checkpoint)
        with pytest.raises(UsageError, match="bias"):
            export(cfg, checkpoint, tmp_path / "model.pt2", "exported-program", part)


def test_what_cannot_be_done_is_said_at_once(tmp_path, monkeypatch):
    cfg = classifier("xcit")
    wrong = tmp_path / "model.onnx"
    with pytest.raises(UsageError, match=r"must end in \.pt2"):
        export(cfg, "none.pth", wrong, "exported-program")
    wrong.touch()
    with monkeypatch.context() as absent:
        absent.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match="needs onnx, onnxruntime, onnxscript: pip install"):
            export(cfg, "none.pth", wrong, "onnx", force=True)
    with pytest.raises(UsageError, match="is there already"):
        export(cfg, "none.pth", wrong, "onnx")
    detector = read_config("mmspectral::quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py")
    with pytest.raises(UsageError, match="--part backbone"):
        export(detector, "none.pth", tmp_path / "model.pt2", "exported-program")


@pytest.mark.slow
def test_the_command_exports_the_backbone_of_a_detector(run_tool, trained_quickstart, tmp_path):
    target = tmp_path / "backbone.pt2"
    checkpoint = trained_quickstart / "epoch_1.pth"
    command = ("export.py", QUICKSTART, checkpoint, "--format", "exported-program", "--out", target)
    whole = run_tool(*command)
    assert whole.returncode == 2
    assert whole.stderr.splitlines()[-1].startswith("export.py: error: A whole detector cannot be exported")
    result = run_tool(*command, "--part", "backbone", "--size", 64, 64)
    assert result.returncode == 0, result.stderr
    assert f"{target}: outputs (2, 128, 8, 8); greatest difference from eager: " in result.stdout
    assert [tuple(y.shape) for y in flat(load(target)(torch.randn(1, 3, 40, 88)))] == [(1, 128, 5, 11)]

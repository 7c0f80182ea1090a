"""Loading backbone weights: what loads, what is refused, and what a correction does to it."""

import pytest
import torch
from mmengine.logging import MMLogger

from mmspectral.layers import fold
from mmspectral.models import SpectralXCiT
from mmspectral.models.checkpoints import load_backbone

TINY = dict(embed_dims=32, depth=2, num_heads=4)
CONDITIONING = dict(type="IdentityCorrection", scale=10.0)


def build(conditioning=None, **kwargs):
    return SpectralXCiT(arch=TINY, patch_size=8, conditioning=conditioning, **kwargs)


def pretrained(path, **kwargs):
    return dict(type="Pretrained", checkpoint=str(path), **kwargs)


@pytest.fixture
def source():
    torch.manual_seed(0)
    model = build()
    model.init_weights()
    return model


@pytest.fixture
def x():
    return torch.randn(2, 3, 32, 40, generator=torch.Generator().manual_seed(1))


def wrap(state, form):
    prefixed = {f"backbone.{name}": tensor for name, tensor in state.items()}
    return {
        "bare": state,
        "state_dict": {"state_dict": state, "meta": {}},
        "model": {"model": state, "epoch": 3},
        "backbone": {"state_dict": {**prefixed, "head.fc.weight": torch.zeros(3, 32)}},
        "module": {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
        "module.backbone": {f"module.backbone.{name}": tensor for name, tensor in state.items()},
    }[form]


@pytest.mark.parametrize("given_prefix", [False, True])
@pytest.mark.parametrize("form", ["bare", "state_dict", "model", "backbone", "module", "module.backbone"])
def test_every_wrapping_loads_completely(form, given_prefix, source, tmp_path):
    """users.md A1 and A3: stock mmpretrain keeps random weights in silence for several of these."""
    torch.save(wrap(source.state_dict(), form), tmp_path / "file.pth")
    prefix = {"backbone": "backbone.", "module": "module.", "module.backbone": "module.backbone."}.get(form, "")
    model = build(init_cfg=pretrained(tmp_path / "file.pth", **(dict(prefix=prefix) if given_prefix else {})))
    model.init_weights()
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    report = load_backbone(build(), str(tmp_path / "file.pth"))
    assert report.matched == report.total == sum(p.numel() for p in source.parameters())
    assert "100.0 %" in str(report) and not report.missing


def test_report_is_logged(source, tmp_path, capsys):
    torch.save(source.state_dict(), tmp_path / "file.pth")
    MMLogger.get_instance("test_report_is_logged")  # the newest logger is the current one
    build(init_cfg=pretrained(tmp_path / "file.pth")).init_weights()
    assert f"matched {sum(p.numel() for p in source.parameters()):,} of" in capsys.readouterr().out


def test_classifier_fills_the_dense_form(source, tmp_path):
    torch.save({"state_dict": {f"backbone.{n}": t for n, t in source.state_dict().items()}}, tmp_path / "file.pth")
    model = build(out_type="featmap", init_cfg=pretrained(tmp_path / "file.pth", prefix="backbone."))
    model.init_weights()
    assert torch.equal(model.xca_layers[1].attn.qkv.weight, source.xca_layers[1].attn.qkv.weight)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda state: {f"blocks.{n}": t for n, t in state.items()}, r"matched 0 of .*'blocks\.cls_token'.*`prefix`"),
        (lambda state: {"optimizer": {}, "epoch": 1}, "holds no state dict.*found optimizer, epoch"),
        (lambda state: [1, 2], "holds no state dict.*list"),
        (lambda state: {**state, "cls_token": torch.zeros(1, 1, 64)}, r"1 shapes differ.*cls_token: file \(1, 1, 64\)"),
        (lambda state: {n: t for n, t in state.items() if not n.startswith("xca_layers.1")}, "At least 90 %"),
    ],
)
def test_what_does_not_fit_is_refused(make, match, source, tmp_path):
    torch.save(make(source.state_dict()), tmp_path / "file.pth")
    with pytest.raises(ValueError, match=match):
        build(init_cfg=pretrained(tmp_path / "file.pth")).init_weights()


def test_missing_and_hostile_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.pth"):
        build(init_cfg=pretrained(tmp_path / "absent.pth")).init_weights()

    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(RuntimeError, match="hostile.pth"):
        build(init_cfg=pretrained(tmp_path / "hostile.pth")).init_weights()
    assert not (tmp_path / "ran").exists()


def test_stock_weights_under_a_correction_are_refused(source, tmp_path, x):
    """lambda = 10 on weights trained without it would compute something else."""
    torch.save(source.state_dict(), tmp_path / "stock.pth")
    with pytest.raises(ValueError, match="trained without a correction.*preserve_function=True"):
        build(CONDITIONING, init_cfg=pretrained(tmp_path / "stock.pth")).init_weights()
    kept = build(dict(CONDITIONING, preserve_function=True), init_cfg=pretrained(tmp_path / "stock.pth"))
    kept.init_weights()
    qkv = kept.xca_layers[0].attn.qkv
    assert not torch.equal(qkv.weight, source.xca_layers[0].attn.qkv.weight)
    for a, b in zip(kept.eval()(x), source.eval()(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preserve", [False, True])
def test_own_checkpoint_loads_unchanged(preserve, tmp_path, x):
    trained = build(CONDITIONING)
    trained.init_weights()
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "ours.pth")
    again = build(dict(CONDITIONING, preserve_function=preserve), init_cfg=pretrained(tmp_path / "ours.pth"))
    again.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(trained.eval()(x), again.eval()(x), strict=True))


def test_other_correction_is_refused_or_converted(tmp_path, x):
    trained = build(dict(CONDITIONING, scale=3.0)).eval()
    torch.save(trained.state_dict(), tmp_path / "three.pth")
    with pytest.raises(ValueError, match=r"trained with IdentityCorrection\(.*scale=3.0\).*built with .*scale=10.0"):
        build(CONDITIONING, init_cfg=pretrained(tmp_path / "three.pth")).init_weights()
    with pytest.raises(ValueError, match="built without one.*fold"):
        build(None, init_cfg=pretrained(tmp_path / "three.pth")).init_weights()
    kept = build(dict(CONDITIONING, preserve_function=True), init_cfg=pretrained(tmp_path / "three.pth"))
    kept.init_weights()
    for a, b in zip(trained(x), kept.eval()(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_folded_checkpoint_is_a_stock_one(tmp_path, x):
    trained = build(CONDITIONING).eval()
    before = trained(x)
    fold(trained)
    torch.save(trained.state_dict(), tmp_path / "folded.pth")
    stock = build(None, init_cfg=pretrained(tmp_path / "folded.pth"))
    stock.init_weights()
    torch.testing.assert_close(stock.eval()(x)[0], before[0], rtol=1e-4, atol=1e-4)


def test_file_that_lost_its_metadata(tmp_path, x):
    trained = build(CONDITIONING).eval()
    torch.save(dict(trained.state_dict()), tmp_path / "bare.pth")
    with pytest.raises(ValueError, match="trained_with_conditioning=True"):
        build(CONDITIONING, init_cfg=pretrained(tmp_path / "bare.pth")).init_weights()
    again = build(CONDITIONING, init_cfg=pretrained(tmp_path / "bare.pth", trained_with_conditioning=True))
    again.init_weights()
    assert torch.equal(trained(x)[0], again.eval()(x)[0])


def test_corrections_of_blocks_that_are_not_built_do_not_matter(tmp_path):
    """A dense backbone drops the class-attention blocks of a classifier, and with them their correction."""
    trained = build(CONDITIONING, class_attention_conditioning=CONDITIONING)
    torch.save(trained.state_dict(), tmp_path / "classifier.pth")
    dense = build(CONDITIONING, out_type="featmap", init_cfg=pretrained(tmp_path / "classifier.pth"))
    dense.init_weights()
    assert torch.equal(dense.xca_layers[1].attn.qkv.weight, trained.xca_layers[1].attn.qkv.weight)

"""Loading backbone weights: what loads, what is refused, and what a correction does to it."""

import mmengine.hub
import pytest
import torch
from mmdet.registry import MODELS as mmdet_models
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmengine.runner import EpochBasedTrainLoop
from torch import nn

from mmspectral.checkpoints import fit_to_model, load_backbone, write_checkpoint
from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.engine.hooks.checkpoint_fitting import CheckpointFittingHook
from mmspectral.errors import DamagedCheckpointError, UsageError
from mmspectral.layers import fold
from mmspectral.models.backbones import SpectralDeiT, SpectralSwin, SpectralXCiT
from mmspectral.registry import MODELS

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


def under(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


def averaged(state):
    return {"steps": torch.tensor(7), **under("module.", state)}


HEAD = {"head.fc.weight": torch.zeros(3, 32)}
# What a file holds, from weights and others; then the entry and the prefix that are found in it.
FORMS = {
    "bare": (lambda state, other: state, "", ""),
    "mmengine": (lambda state, other: {"state_dict": state, "meta": {}}, "state_dict", ""),
    "official": (lambda state, other: {"model": state, "epoch": 3}, "model", ""),
    "backbone": (lambda state, other: {"state_dict": under("backbone.", state) | HEAD}, "state_dict", "backbone."),
    "ddp": (lambda state, other: {"model": under("module.", state)}, "model", "module."),
    "ddp-backbone": (lambda state, other: under("module.backbone.", state), "", "module.backbone."),
    "timm-ema": (lambda s, other: {"state_dict": other, "state_dict_ema": averaged(s)}, "state_dict_ema", ""),
    "official-ema": (lambda state, other: {"model": other, "model_ema": state, "optimizer": {}}, "model_ema", ""),
    "mmengine-ema": (lambda state, other: {"state_dict": state, "ema_state_dict": averaged(other)}, "state_dict", ""),
    "only-ema": (lambda state, other: {"ema_state_dict": averaged(state)}, "ema_state_dict", ""),
    "compiled": (
        lambda state, other: {f"_orig_mod.{n}".replace(".0.", ".0._orig_mod."): t for n, t in state.items()},
        "",
        "",
    ),
    "wrapped-twice": (
        lambda state, other: under("module._orig_mod.backbone.", state),
        "",
        "module._orig_mod.backbone.",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_wrapping_loads_completely(form, source, tmp_path, capsys):
    """Stock mmpretrain keeps random weights in silence for several of these."""
    make, entry, prefix = FORMS[form]
    other = {name: tensor + 1 for name, tensor in source.state_dict().items()}
    torch.save(make(source.state_dict(), other), tmp_path / "file.pth")
    MMLogger.get_instance(f"test_every_wrapping_{form}")  # the newest logger is the current one
    count = sum(p.numel() for p in source.parameters())
    for options in ({}, dict(prefix=prefix)):
        model = build(init_cfg=pretrained(tmp_path / "file.pth", **options))
        model.init_weights()
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in source.state_dict().items())
        assert f"matched {count:,} of" in capsys.readouterr().out
    report = load_backbone(build(), str(tmp_path / "file.pth"))
    assert report.matched == report.total == count and report.entry == entry
    assert "100.0 %" in str(report) and not report.missing and not report.unused


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


THREE, KEPT = dict(CONDITIONING, scale=3.0), dict(CONDITIONING, preserve_function=True)


@pytest.mark.parametrize(
    ("trained", "form", "own", "options", "refused"),
    [
        # lambda = 10 on weights trained without it would compute something else.
        (None, "saved", CONDITIONING, {}, "trained without a correction.*preserve_function=True"),
        (None, "saved", KEPT, {}, None),
        (CONDITIONING, "saved", CONDITIONING, {}, None),
        (CONDITIONING, "saved", KEPT, {}, None),
        (THREE, "saved", CONDITIONING, {}, r"trained with IdentityCorrection\(.*scale=3.0\).*built with .*scale=10.0"),
        (THREE, "saved", None, {}, "built without one.*fold"),
        (THREE, "saved", KEPT, {}, None),
        (CONDITIONING, "folded", None, {}, None),
        (CONDITIONING, "without metadata", CONDITIONING, {}, "trained_with_conditioning=True"),
        (CONDITIONING, "without metadata", CONDITIONING, dict(trained_with_conditioning=True), None),
    ],
)
def test_a_correction_of_the_file_and_one_of_the_model(trained, form, own, options, refused, tmp_path, x):
    source = build(trained).eval()
    source.init_weights()
    expected = source(x)
    state = (fold(source) if form == "folded" else source).state_dict()
    torch.save(dict(state) if form == "without metadata" else state, tmp_path / "file.pth")
    model = build(own, init_cfg=pretrained(tmp_path / "file.pth", **options))
    if refused:
        with pytest.raises(ValueError, match=refused):
            model.init_weights()
        return
    model.init_weights()
    exact = own == trained
    weights = [m.xca_layers[0].attn.qkv.weight for m in (model, source)]
    assert torch.equal(*weights) == (trained not in (None, THREE))
    for a, b in zip(model.eval()(x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)


def test_corrections_of_blocks_that_are_not_built_do_not_matter(tmp_path):
    """A dense backbone drops the class-attention blocks of a classifier, and with them their correction."""
    trained = build(CONDITIONING, class_attention_conditioning=CONDITIONING)
    torch.save(trained.state_dict(), tmp_path / "classifier.pth")
    dense = build(CONDITIONING, out_type="featmap", init_cfg=pretrained(tmp_path / "classifier.pth"))
    dense.init_weights()
    assert torch.equal(dense.xca_layers[1].attn.qkv.weight, trained.xca_layers[1].attn.qkv.weight)


def test_another_entry_on_request(source, tmp_path):
    other = {name: tensor + 1 for name, tensor in source.state_dict().items()}
    torch.save({"state_dict": source.state_dict(), "ema_state_dict": averaged(other)}, tmp_path / "file.pth")
    model = build()
    load_backbone(model, str(tmp_path / "file.pth"), entry="ema_state_dict")
    assert torch.equal(model.cls_token, source.cls_token + 1)
    with pytest.raises(ValueError, match="no state dict under 'model_ema'; found state_dict, ema_state_dict"):
        load_backbone(model, str(tmp_path / "file.pth"), entry="model_ema")


def test_safetensors_keep_the_correction(tmp_path, x):
    pytest.importorskip("safetensors")
    trained = build(CONDITIONING).eval()
    write_checkpoint(dict(state_dict=trained.state_dict()), tmp_path / "ours.safetensors")
    again = build(CONDITIONING, init_cfg=pretrained(tmp_path / "ours.safetensors"))
    again.init_weights()
    assert torch.equal(trained(x)[0], again.eval()(x)[0])
    with pytest.raises(ValueError, match="built without one"):
        load_backbone(build(), str(tmp_path / "ours.safetensors"))
    (tmp_path / "damaged.safetensors").write_bytes(b"no header")
    with pytest.raises(DamagedCheckpointError, match="is no safetensors file"):
        load_backbone(build(), str(tmp_path / "damaged.safetensors"))
    with pytest.raises(FileNotFoundError, match="absent"):
        load_backbone(build(), str(tmp_path / "absent.safetensors"))


def test_a_stored_correction_is_taken_from_the_file(tmp_path, x):
    """C of an SVD with an interval belongs to an earlier W; the file's buffer counts, not the C of its W."""
    trained = build(dict(type="SVDCorrection", interval=5)).eval()
    with torch.no_grad():
        trained.xca_layers[0].attn.qkv.weight += 0.1
    torch.save(trained.state_dict(), tmp_path / "svd.pth")
    kept = build(dict(CONDITIONING, preserve_function=True), init_cfg=pretrained(tmp_path / "svd.pth"))
    kept.init_weights()
    torch.testing.assert_close(kept.eval()(x)[0], trained(x)[0], rtol=1e-4, atol=1e-4)


SWIN = dict(arch=dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2]))


def test_bias_tables_of_another_window(tmp_path):
    """As load_state_dict resizes them (tests/test_models/test_swin.py), from timm's names, and listed."""
    big, small, direct = (SpectralSwin(**SWIN, window_size=window) for window in (12, 7, 7))
    for parameter in big.parameters():
        nn.init.normal_(parameter)
    torch.save({"model": from_mmpretrain(big.state_dict(), naming_of(FAMILIES["swin"], "timm"))}, tmp_path / "swin.pth")
    report = load_backbone(small, str(tmp_path / "swin.pth"))
    tables = [name for name, _ in big.named_parameters() if name.endswith("bias_table")]
    assert report.resized == tuple(tables) and report.matched == report.total
    assert f"resized: {tables[0]}" in str(report)
    direct.load_state_dict(big.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), direct.parameters(), strict=True))
    assert not load_backbone(SpectralSwin(**SWIN, window_size=12), str(tmp_path / "swin.pth")).resized


VIT = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=32)


@pytest.mark.parametrize("from_distilled", [True, False])
def test_distillation_token(from_distilled, tmp_path):
    """198 rows of a distilled file into 197 and back, under the official names."""
    torch.manual_seed(0)
    arch = dict(VIT, num_layers=2)
    old, new = (SpectralDeiT(arch, distillation=d) for d in (from_distilled, not from_distilled))
    heads = {f"{name}.weight": torch.zeros(5, 16) for name in ("head", *(["head_dist"] if from_distilled else []))}
    official = from_mmpretrain(old.state_dict(), naming_of(FAMILIES["vit"], "official"))
    torch.save({"model": official | heads}, tmp_path / "deit.pth")
    drawn = new.pos_embed.detach().clone()
    report = load_backbone(new, str(tmp_path / "deit.pth"))
    assert report.resized == ("pos_embed",) and len(report.skipped) == len(heads)
    assert torch.equal(new.pos_embed[:, -196:], old.pos_embed[:, -196:])
    assert torch.equal(new.pos_embed[:, 0], old.pos_embed[:, 0])
    if from_distilled:
        assert report.unused == ("dist_token",) and report.matched == report.total
    else:
        assert report.missing == ("dist_token",)
        assert torch.equal(new.pos_embed[:, 1], drawn[:, 1])


def test_a_file_of_another_family_or_size_is_named(tmp_path):
    swin = SpectralSwin(**SWIN, window_size=4)
    torch.save(from_mmpretrain(swin.state_dict(), naming_of(FAMILIES["swin"], "timm")), tmp_path / "swin.pth")
    with pytest.raises(ValueError, match="The file holds a swin, and SpectralXCiT is a xcit"):
        load_backbone(build(), str(tmp_path / "swin.pth"))
    deeper = SpectralSwin(dict(embed_dims=16, depths=[9, 9], num_heads=[1, 2]), window_size=4)
    with pytest.raises(
        ValueError,
        match=r"2 in stages.0.blocks and SpectralSwin 9; 1 in stages.1.blocks and SpectralSwin 9: state its `arch`",
    ):
        load_backbone(deeper, str(tmp_path / "swin.pth"))
    wider = SpectralSwin(dict(SWIN["arch"], num_heads=[2, 4]), window_size=4)
    with pytest.raises(ValueError, match=r"3 shapes differ.*bias_table: file \(49, 1\), model \(49, 2\)"):
        load_backbone(wider, str(tmp_path / "swin.pth"))


def classifier(num_classes, conditioning=None):
    return MODELS.build(
        dict(
            type="mmpretrain.ImageClassifier",
            backbone=dict(type="mmspectral.SpectralXCiT", arch=TINY, patch_size=8, conditioning=conditioning),
            head=dict(type="mmpretrain.LinearClsHead", num_classes=num_classes, in_channels=32),
        )
    )


def test_a_head_of_other_classes_is_skipped_and_listed():
    """On a classifier; on a Mask R-CNN below."""
    source, target = classifier(80), classifier(2)
    weights, report = fit_to_model(target, {"state_dict": source.state_dict()}, "file.pth")
    assert report.share == 1 and report.skipped == ("head.fc.weight", "head.fc.bias")
    assert not report.missing and "skipped: head (2 tensors)" in str(report)
    missing, unexpected = target.load_state_dict(weights.state_dict(), strict=False)
    assert missing == ["head.fc.weight", "head.fc.bias"] and not unexpected
    assert torch.equal(target.backbone.cls_token, source.backbone.cls_token)
    same = classifier(80)
    weights, report = fit_to_model(same, {"state_dict": source.state_dict()}, "file.pth")
    assert not report.skipped and same.load_state_dict(weights.state_dict(), strict=True)
    official = from_mmpretrain(source.backbone.state_dict(), naming_of(FAMILIES["xcit"], "official"))
    official |= {f"head.{leaf}": tensor for leaf, tensor in source.head.fc.state_dict().items()}
    weights, report = fit_to_model(same, {"model": official}, "official.pth")
    assert not report.skipped and same.load_state_dict(weights.state_dict(), strict=True)


def test_whole_models_compare_corrections():
    trained = classifier(3, CONDITIONING)
    file = {"state_dict": trained.state_dict()}
    weights, _ = fit_to_model(classifier(3, CONDITIONING), file, "file.pth")
    assert torch.equal(weights.tensors["backbone.cls_token"], trained.backbone.cls_token)
    for conditioning in (None, dict(CONDITIONING, scale=1.0)):
        with pytest.raises(ValueError, match=r"file.pth: backbone.xca_layers.0.attn.qkv was trained with .*scale=10.0"):
            fit_to_model(classifier(3, conditioning), file, "file.pth")
    with pytest.raises(ValueError, match="matched 0 of"):
        fit_to_model(classifier(3), {"state_dict": {"backbone.conv1.weight": torch.zeros(3)}}, "file.pth")


def test_a_file_without_notes_is_accepted_with_a_warning(capsys):
    MMLogger.get_instance("test_a_file_without_notes")
    fit_to_model(classifier(3, CONDITIONING), {"state_dict": dict(classifier(3).state_dict())}, "stock.pth")
    assert "stock.pth does not say under which correction backbone.xca_layers.0.attn.qkv" in capsys.readouterr().out
    fit_to_model(classifier(3), {"state_dict": dict(classifier(3).state_dict())}, "stock.pth")
    assert "does not say" not in capsys.readouterr().out


def mask_rcnn(num_classes):
    cfg = mmengine.hub.get_config("mmdet::_base_/models/mask-rcnn_r50_fpn.py")
    cfg.model.backbone = dict(
        type="mmspectral.SpectralSwin", **SWIN, window_size=4, out_indices=(0, 1), _scope_="mmspectral"
    )
    cfg.model.neck.update(in_channels=[16, 32], out_channels=16, num_outs=5)
    cfg.model.rpn_head.update(in_channels=16, feat_channels=16)
    for name in ("bbox_roi_extractor", "mask_roi_extractor"):
        cfg.model.roi_head[name].out_channels = 16
    cfg.model.roi_head.bbox_head.update(in_channels=16, fc_out_channels=16, num_classes=num_classes)
    cfg.model.roi_head.mask_head.update(in_channels=16, conv_out_channels=16, num_classes=num_classes)
    with DefaultScope.overwrite_default_scope("mmdet"):
        return mmdet_models.build(cfg.model)


def test_mask_rcnn_of_80_classes_fills_one_of_2():
    source, target = mask_rcnn(80), mask_rcnn(2)
    weights, report = fit_to_model(target, {"state_dict": source.state_dict(), "meta": {}}, "coco.pth")
    assert report.share == 1 and not report.missing
    assert {name.rpartition(".")[0] for name in report.skipped} == {
        "roi_head.bbox_head.fc_cls",
        "roi_head.bbox_head.fc_reg",
        "roi_head.mask_head.conv_logits",
    }
    missing, unexpected = target.load_state_dict(weights.state_dict(), strict=False)
    assert set(missing) == set(report.skipped) and not unexpected
    assert torch.equal(target.rpn_head.rpn_cls.weight, source.rpn_head.rpn_cls.weight)


class RunnerOf:
    """What the hook sees of a Runner."""

    def __init__(self, model, resume=False, trains=True):
        self.model, self._resume, self._load_from = model, resume, "file.pth"
        self._train_loop = EpochBasedTrainLoop.__new__(EpochBasedTrainLoop) if trains else None


def test_the_hook_hands_fitting_weights_to_the_runner():
    source, target = classifier(5), classifier(2)
    checkpoint = {"state_dict": {f"module.{name}": tensor for name, tensor in source.state_dict().items()}}
    given = checkpoint["state_dict"]
    CheckpointFittingHook().after_load_checkpoint(RunnerOf(target, resume=True), checkpoint)
    assert checkpoint["state_dict"] is given
    with pytest.raises(UsageError, match=r"head.*\(5,.*\) in the file, \(2,.*\) in the model"):
        CheckpointFittingHook().after_load_checkpoint(RunnerOf(target, trains=False), dict(checkpoint))
    CheckpointFittingHook().after_load_checkpoint(RunnerOf(nn.DataParallel(target)), checkpoint)
    assert checkpoint["state_dict"].keys() == {n for n in target.state_dict() if n.startswith("backbone.")}
    with pytest.raises(ValueError, match="file.pth.*At least 100 % must match"):
        CheckpointFittingHook(1.0).after_load_checkpoint(
            RunnerOf(target), {"state_dict": {"cls_token": torch.zeros(1)}}
        )

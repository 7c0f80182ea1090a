"""tools/model_converters: other names, folded, unfolded, published; and what they refuse."""

import hashlib
import re
import runpy
import sys
from collections import OrderedDict

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger

from mmspectral.checkpoints import (
    convert,
    find_weights,
    fold_file,
    load_backbone,
    publish,
    read_checkpoint,
    unfold_file,
)
from mmspectral.compat.checkpoints import FORCE_UNSAFE
from mmspectral.errors import UsageError
from mmspectral.layers import METADATA_KEY
from mmspectral.models.backbones import SpectralSwin, SpectralXCiT
from mmspectral.registry import MODELS
from tests.helpers import TOOLS

TINY = dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2])
SMALL = dict(embed_dims=32, depth=1, num_heads=4)
IDENTITY = dict(type="IdentityCorrection", scale=0.5)
SVD = dict(type="SVDCorrection", interval=4)


pytestmark = pytest.mark.usefixtures("loaders")


def classifier(conditioning=None):
    torch.manual_seed(0)
    return MODELS.build(
        dict(
            type="mmpretrain.ImageClassifier",
            backbone=dict(type="mmspectral.SpectralSwin", arch=TINY, window_size=4, conditioning=conditioning),
            neck=dict(type="mmpretrain.GlobalAveragePooling"),
            head=dict(type="mmpretrain.LinearClsHead", num_classes=3, in_channels=32),
        )
    )


def config(conditioning):
    model = dict(type="mmspectral.SpectralXCiT", arch=SMALL, patch_size=8, conditioning=conditioning)
    return Config(dict(default_scope="mmpretrain", model=model))


def save(model, path, **rest):
    torch.save(dict(state_dict=model.state_dict(), **rest), path)
    return str(path)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_to_every_naming_and_back(suffix, tmp_path):
    """Timm loads the result strictly, and what comes back loads strictly into stock code."""
    timm_swin = pytest.importorskip("timm.models.swin_transformer")
    model = classifier().eval()
    current = save(model, tmp_path / "ours.pth", meta=dict(epoch=3))
    for step, to in enumerate(("timm", "official", "timm", "mmpretrain")):
        target = tmp_path / f"{step}{suffix}"
        assert f"to those of {to}." in convert(current, target, to)
        current = str(target)
        if to == "timm":
            theirs = timm_swin.SwinTransformer(
                img_size=64, embed_dim=16, depths=(2, 1), num_heads=(1, 2), window_size=4, num_classes=3
            ).eval()
            theirs.load_state_dict(find_weights(read_checkpoint(current), current).tensors, strict=True)
            x = torch.randn(2, 3, 64, 64)
            torch.testing.assert_close(theirs(x), model(x), rtol=1e-4, atol=1e-4)
    assert equal(find_weights(read_checkpoint(current), current).tensors, model.state_dict())
    if suffix == ".pth":
        assert read_checkpoint(current)["meta"] == dict(epoch=3)
        assert "model" in read_checkpoint(str(tmp_path / "1.pth"))
    again = tmp_path / f"again{suffix}"
    convert(current, again, "mmpretrain")
    assert equal(find_weights(read_checkpoint(str(again)), "").tensors, model.state_dict())


def test_for_mmdet_the_backbone_alone(tmp_path):
    model = classifier(IDENTITY)
    source = save(model, tmp_path / "ours.pth")
    assert "2 tensors outside the backbone left out" in convert(source, tmp_path / "mmdet.pth", "mmdet")
    target = SpectralSwin(arch=TINY, window_size=4, conditioning=IDENTITY, out_indices=(0, 1))
    assert load_backbone(target, str(tmp_path / "mmdet.pth"), prefix="backbone.").naming == ""
    assert torch.equal(
        target.stages[1].blocks[0].attn.w_msa.qkv.weight, model.backbone.stages[1].blocks[0].attn.w_msa.qkv.weight
    )


def test_fold_and_unfold_are_inverse(tmp_path):
    torch.manual_seed(0)
    model = SpectralXCiT(arch=SMALL, patch_size=8, conditioning=IDENTITY).eval()
    source = save(model, tmp_path / "ours.pth", meta=dict(epoch=3))
    assert "1 corrections folded" in fold_file(source, tmp_path / "folded.pth")
    stock = SpectralXCiT(arch=SMALL, patch_size=8).eval()
    load_backbone(stock, str(tmp_path / "folded.pth"))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(stock(x)[0], model(x)[0], rtol=1e-5, atol=1e-5)
    unfold_file(config(IDENTITY), str(tmp_path / "folded.pth"), tmp_path / "unfolded.pth")
    again = SpectralXCiT(arch=SMALL, patch_size=8, conditioning=IDENTITY).eval()
    load_backbone(again, str(tmp_path / "unfolded.pth"))
    torch.testing.assert_close(again.xca_layers[0].attn.qkv.weight, model.xca_layers[0].attn.qkv.weight)
    assert read_checkpoint(str(tmp_path / "unfolded.pth"))["meta"] == dict(epoch=3)
    for cfg, file, match in (
        (config(IDENTITY), "unfolded.pth", "has a correction already"),
        (config(None), "folded.pth", "no corrections"),
        (config(dict(type="SVDCorrection")), "folded.pth", "no W was found"),
    ):
        with pytest.raises(UsageError, match=match):
            unfold_file(cfg, str(tmp_path / file), tmp_path / "never.pth")
    with pytest.raises(UsageError, match="no weight is noted to have a correction"):
        fold_file(str(tmp_path / "folded.pth"), tmp_path / "never.pth")
    assert not (tmp_path / "never.pth").exists()


@pytest.mark.parametrize("conditioning", [IDENTITY, SVD], ids=["identity", "stored-svd"])
@pytest.mark.parametrize("fold", [False, True])
def test_published_files_have_weights_meta_and_a_hash(conditioning, fold, tmp_path):
    torch.manual_seed(0)
    model = SpectralXCiT(arch=SMALL, patch_size=8, conditioning=conditioning).eval()
    source = save(
        model,
        tmp_path / "epoch_3.pth",
        meta=dict(epoch=3),
        optimizer=dict(state={}),
        message_hub=dict(),
        ema_state_dict=OrderedDict(steps=torch.tensor(3)),
    )
    final = publish(source, tmp_path / "out" / "xcit.pth", fold)
    digest = hashlib.sha256(final.read_bytes()).hexdigest()[:8]
    assert re.fullmatch(rf"xcit_\d{{8}}-{digest}\.pth", final.name)
    assert [file.name for file in final.parent.iterdir()] == [final.name]
    published = torch.load(final, weights_only=True)
    assert published.keys() == {"state_dict", "meta"}
    folded = fold or conditioning is SVD
    assert any(METADATA_KEY in entry for entry in published["state_dict"]._metadata.values()) != folded
    assert not [name for name in published["state_dict"] if name.endswith("correction")]
    reader = SpectralXCiT(arch=SMALL, patch_size=8, conditioning=None if folded else conditioning).eval()
    load_backbone(reader, str(final))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(reader(x)[0], model(x)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match="is there already"):
        publish(source, tmp_path / "out" / "xcit.pth", fold)
    assert publish(source, tmp_path / "out" / "xcit.pth", fold, force=True) == final


def test_half_precision_is_warned_of(tmp_path, capsys):
    MMLogger.get_instance("test_half_precision_is_warned_of")  # the newest logger is the current one
    source = save(SpectralXCiT(arch=SMALL, patch_size=8).half(), tmp_path / "half.pth")
    publish(source, tmp_path / "xcit.pth")
    assert "weights in torch.float16 are published as they are" in capsys.readouterr().out


def test_a_correction_does_not_get_lost_on_the_way_to_other_code(tmp_path):
    source = save(classifier(IDENTITY), tmp_path / "ours.pth")
    with pytest.raises(UsageError, match=r"3 weights, such as backbone\.stages\.0\..*Fold the file first"):
        convert(source, tmp_path / "timm.pth", "timm")
    fold_file(source, tmp_path / "folded.pth")
    convert(str(tmp_path / "folded.pth"), tmp_path / "timm.pth", "timm")
    convert(source, tmp_path / "mmpretrain.pth", "mmpretrain")
    notes = find_weights(read_checkpoint(str(tmp_path / "mmpretrain.pth")), "").metadata
    assert sum(METADATA_KEY in entry for entry in notes.values()) == 3


@pytest.mark.parametrize("to", ["timm", "official"])
def test_random_features_do_not_get_lost_on_the_way_to_other_code(to, tmp_path):
    backbone = dict(type="mmspectral.DarkSwin", arch=TINY, kernel=dict(type="dark", num_features=8))
    source = save(MODELS.build(backbone), tmp_path / "dark.pth")
    with pytest.raises(UsageError, match=rf"tensors, such as stages\..*DARK attention, which code with {to} names"):
        convert(source, tmp_path / "other.pth", to)
    convert(source, tmp_path / "mmpretrain.pth", "mmpretrain")
    assert not (tmp_path / "other.pth").exists() and (tmp_path / "mmpretrain.pth").exists()


def test_what_is_refused(tmp_path, monkeypatch):
    source = save(classifier(), tmp_path / "ours.pth")
    before = (tmp_path / "ours.pth").read_bytes()
    with pytest.raises(UsageError, match="ours.pth is there already; choose another name or pass --force"):
        convert(source, tmp_path / "ours.pth", "timm")
    assert (tmp_path / "ours.pth").read_bytes() == before
    with pytest.raises(UsageError, match="known from timm, official, mmcls, not from 'mmseg'"):
        convert(source, tmp_path / "never.pth", "mmseg")
    with pytest.raises(UsageError, match="names, such as .* are of no code base known for davit"):
        convert(source, tmp_path / "never.pth", "timm", family="davit")
    with pytest.raises(UsageError, match="There is no checkpoint"):
        convert(str(tmp_path / "absent.pth"), tmp_path / "never.pth", "timm")

    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.pth")
    monkeypatch.setenv(FORCE_UNSAFE, "1")  # converters take no notice of it
    with pytest.raises(UsageError, match="is not read, because reading it may run code from it: it names .*open"):
        convert(str(tmp_path / "hostile.pth"), tmp_path / "never.pth", "timm")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "never.pth").exists()


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command line in this process and returns its exit status and output."""

    def run_in_process(name, *arguments):
        tool = TOOLS / "model_converters" / name
        monkeypatch.setattr(sys, "argv", [str(tool), *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(str(tool), run_name="__main__")
        except SystemExit as exit_:
            status = exit_.code
        return status, *capsys.readouterr()

    return run_in_process


def test_command_lines(run, tmp_path):
    torch.manual_seed(0)
    model = SpectralXCiT(arch=SMALL, patch_size=8, conditioning=IDENTITY)
    source = save(model, tmp_path / "ours.pth")
    config(IDENTITY).dump(tmp_path / "config.py")
    timm, unfolded = tmp_path / "timm.safetensors", tmp_path / "unfolded.pth"
    runs = [
        run("fold.py", source, tmp_path / "folded.pth"),
        run("convert.py", tmp_path / "folded.pth", timm, "--to", "timm", "--family", "xcit"),
        run("unfold.py", tmp_path / "config.py", tmp_path / "folded.pth", unfolded),
        run("publish.py", source, tmp_path / "out" / "xcit.pth", "--fold"),
        run("fold.py", source, tmp_path / "folded.pth", "--force"),
    ]
    assert [status for status, *_ in runs] == [0] * 5
    assert timm.exists() and unfolded.exists()
    assert str(next((tmp_path / "out").iterdir())) in runs[3][1]
    status, _, error = run("fold.py", source, tmp_path / "folded.pth")
    assert status == 2
    assert error.strip().splitlines()[-1].startswith("fold.py: error: ") and "--force" in error

"""What SpectralXCiT has beside the promises of every backbone."""

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mmspectral.checkpoints.names import FAMILIES, from_mmpretrain, naming_of
from mmspectral.models import SpectralXCiT


def build(**kwargs):
    return SpectralXCiT(dict(embed_dims=32, depth=3, num_heads=4), patch_size=8, **kwargs)


def dense(**kwargs):
    return build(out_type="featmap", out_indices=(0, 1, 2), **kwargs)


def test_single_patch_with_batch_norm_is_a_clear_error():
    model = dense().train()
    with pytest.raises(ValueError, match="single 8-pixel patch"):
        model(torch.randn(1, 3, 8, 8))
    frozen = dense(norm_eval=True).train()
    assert frozen.training and not any(m.training for m in frozen.modules() if isinstance(m, _BatchNorm))
    assert frozen(torch.randn(1, 3, 8, 8))[0].isfinite().all()
    assert model.eval()(torch.randn(1, 3, 8, 8))[0].isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="SyncBN stays where there is CUDA")
def test_sync_bn_falls_back_on_the_cpu():
    """Without a process group; with one: tests/test_engine."""
    norms = [module for module in dense(bn_norm_cfg=dict(type="SyncBN")).modules() if isinstance(module, _BatchNorm)]
    assert {type(norm) for norm in norms} == {torch.nn.BatchNorm2d}


def test_names_without_weight_decay_are_those_of_timm():
    xcit = pytest.importorskip("timm.models.xcit")
    theirs = xcit.Xcit(embed_dim=32, depth=1, num_heads=4, patch_size=16)
    names = dict(theirs.named_parameters())
    assert build().no_weight_decay() == {name for name in theirs.no_weight_decay() if name in names} == {"cls_token"}
    assert dense().no_weight_decay() == set()


@pytest.mark.parametrize("patch_size", [16, 8])
def test_published_settings_are_those_of_timm(patch_size):
    """And the function of the smallest, with every parameter random: a fresh norm of a norm would not show."""
    timm = pytest.importorskip("timm")
    for arch in ("nano-12", "tiny-12"):
        name = f"xcit_{arch.replace('-', '_')}_p{patch_size}_224"
        with torch.device("meta"):
            ours, theirs = SpectralXCiT(arch, patch_size), timm.create_model(name, num_classes=0)
        renamed = from_mmpretrain(ours.state_dict(), naming_of(FAMILIES["xcit"], "timm"))
        assert {n: t.shape for n, t in renamed.items()} == {n: t.shape for n, t in theirs.state_dict().items()}
        for a, b in zip(ours.ca_layers, theirs.cls_attn_blocks, strict=True):
            assert a.tokens_norm == b.tokens_norm
    ours = SpectralXCiT("nano-12", patch_size).eval()
    theirs = timm.create_model(f"xcit_nano_12_p{patch_size}_224", num_classes=0)
    for parameter in ours.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.load_state_dict(from_mmpretrain(ours.state_dict(), naming_of(FAMILIES["xcit"], "timm")), strict=True)
    x = torch.randn(1, 3, 48, 64)
    torch.testing.assert_close(theirs.eval()(x), ours(x)[0], rtol=1e-3, atol=1e-3)

"""Layer-wise learning-rate decay on our backbones, alone and inside the hosts' models."""

import mmpretrain.models  # noqa: F401
import pytest
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmspectral.engine.optimizers import LayerDecayOptimWrapperConstructor
from mmspectral.models import SpectralXCiT
from tests.helpers import QUICKSTART

CONDITIONING = dict(type="IdentityCorrection", scale=0.5)
VIT = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=64)
BACKBONES = {
    "xcit": dict(
        type="mmspectral.SpectralXCiT",
        arch=dict(embed_dims=32, depth=3, num_heads=4),
        patch_size=16,
        conditioning=CONDITIONING,
    ),
    "vit": dict(type="mmspectral.SpectralViT", arch=VIT, img_size=64, conditioning=CONDITIONING),
    "deit": dict(type="mmspectral.SpectralDeiT", arch=VIT, img_size=64, distillation=True, conditioning=CONDITIONING),
}
LR, WEIGHT_DECAY, RATE = 1e-3, 0.05, 0.5


def bare(name, **kwargs):
    return MODELS.build(dict(BACKBONES[name], **kwargs))


def mask_rcnn(backbone):
    cfg = Config.fromfile(QUICKSTART)
    cfg.model.backbone = dict(backbone, out_type="featmap", out_indices=(2,))
    cfg.model.neck[0].update(in_channels=32, scales=(4, 2, 1, 0.5))
    cfg.model.neck[1].in_channels = [32] * 4
    with DefaultScope.overwrite_default_scope("mmdet"):
        return MODELS.build(cfg.model)


def wrapper(model, **paramwise_cfg):
    cfg = dict(
        type="OptimWrapper",
        optimizer=dict(type="AdamW", lr=LR, weight_decay=WEIGHT_DECAY),
        constructor="mmspectral.LayerDecayOptimWrapperConstructor",
        paramwise_cfg=dict(dict(layer_decay_rate=RATE), **paramwise_cfg),
    )
    return build_optim_wrapper(model, cfg)


def settings_by_name(model, **paramwise_cfg):
    """Return {name: (lr, weight decay)}; every trainable parameter must be in exactly one group."""
    groups = wrapper(model, **paramwise_cfg).optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assigned = [parameter for group in groups for parameter in group["params"]]
    assert len(assigned) == len(set(assigned)) and set(assigned) == set(names)
    return {names[p]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def check_rates(rates, prefix, backbone):
    """Check the rates of stem, blocks and the rest against their definition."""
    blocks = f"{prefix}{'xca_layers' if isinstance(backbone, SpectralXCiT) else 'layers'}."
    depths = len(getattr(backbone, "ca_layers", ())) + 3 + 2
    for name, lr in rates.items():
        if name.startswith(blocks):
            expected = LR * RATE ** (depths - 2 - int(name[len(blocks) :].split(".")[0]))
        elif name.startswith((f"{prefix}patch_embed", f"{prefix}pos_embed", f"{prefix}dist_token")):
            expected = LR * RATE ** (depths - 1)
        elif name.startswith((f"{prefix}cls_token", f"{prefix}ca_layers")):
            continue  # their place differs between the families: see their own tests
        else:
            expected = LR
        assert lr == pytest.approx(expected, rel=1e-12), name


def classifier(backbone):
    head = dict(type="LinearClsHead", num_classes=3, in_channels=32)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        return MODELS.build(dict(type="ImageClassifier", backbone=backbone, head=head))


@pytest.mark.parametrize("build", [MODELS.build, mask_rcnn, classifier], ids=["bare", "detector", "classifier"])
@pytest.mark.parametrize("name", BACKBONES)
def test_rates(name, build):
    model = build(BACKBONES[name])
    rates = {n: lr for n, (lr, _) in settings_by_name(model, norm_decay_mult=0.0).items()}
    prefix = "backbone." if hasattr(model, "backbone") else ""
    check_rates(rates, prefix, getattr(model, "backbone", model))
    assert {lr for n, lr in rates.items() if not n.startswith(prefix)} <= {LR}
    assert len({lr for n, lr in rates.items() if n.startswith(prefix)}) >= 4


@pytest.mark.parametrize("kind", ["Swin", "DaViT"])
def test_mask_rcnn_on_a_backbone_of_stages(kind):
    """The rate grows by 1 / RATE from block to block across the stages."""
    cfg = Config.fromfile(QUICKSTART)
    arch = dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2])
    cfg.model.backbone = dict(type=f"mmspectral.Spectral{kind}", arch=arch, out_indices=(0, 1))
    cfg.model.neck = dict(type="FPN", in_channels=[16, 32], out_channels=256, num_outs=5)
    with DefaultScope.overwrite_default_scope("mmdet"):
        model = MODELS.build(cfg.model)
    rates = {name: lr for name, (lr, _) in settings_by_name(model).items()}
    places = ["backbone.patch_embed", *(f"backbone.stages.{i}.blocks.{j}." for i, j in ((0, 0), (0, 1), (1, 0)))]
    for depth, place in enumerate([*places, "backbone.norm"]):
        found = [lr for name, lr in rates.items() if name.startswith(place)]
        assert found == pytest.approx([LR * RATE ** (4 - depth)] * len(found), rel=1e-12) and found, place
    assert rates["backbone.stages.0.downsample.norm.weight"] == pytest.approx(LR * RATE**2, rel=1e-12)
    assert {lr for name, lr in rates.items() if not name.startswith("backbone.")} == {LR}


class Wrapper(nn.Module):
    """Stands for DistributedDataParallel, which needs a process group: a child named ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_distributed_wrappers_around_the_model_and_inside_it():
    plain = mask_rcnn(BACKBONES["vit"])
    expected = settings_by_name(plain)
    groups = wrapper(Wrapper(plain)).optimizer.param_groups
    names = {parameter: name for name, parameter in plain.named_parameters()}
    assert {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]} == expected
    plain.backbone = Wrapper(plain.backbone)  # as MMSeparateDistributedDataParallel does
    inside = settings_by_name(plain)
    assert {n.replace("backbone.module.", "backbone."): value for n, value in inside.items()} == expected


def test_weight_decay_follows_the_options_and_the_backbone():
    model = mask_rcnn(BACKBONES["deit"])
    found = settings_by_name(
        model,
        norm_decay_mult=0.0,
        bias_decay_mult=0.5,
        custom_keys={"roi_head": dict(lr_mult=2.0), "layers.1": dict(decay_mult=0.1), "layers.1.attn.proj": dict()},
    )
    decay = {name: weight_decay / WEIGHT_DECAY for name, (_, weight_decay) in found.items()}
    for name in ("pos_embed", "cls_token", "dist_token", "ln1.weight", "ln1.bias", "layers.0.ln1.bias"):
        assert decay[f"backbone.{name}"] == 0, name
    assert decay["backbone.layers.0.attn.qkv.weight"] == decay["neck.1.lateral_convs.0.conv.weight"] == 1
    assert decay["backbone.layers.0.attn.qkv.bias"] == decay["rpn_head.rpn_cls.bias"] == 0.5
    assert decay["neck.0.ops.0.1.weight"] == 0
    assert decay["backbone.layers.1.ln1.weight"] == pytest.approx(0.1)  # a custom key wins
    assert decay["backbone.layers.1.attn.proj.bias"] == 1  # the longest key wins, whole
    roi = {lr for name, (lr, _) in found.items() if name.startswith("roi_head")}
    assert roi == {2 * LR}
    kept = settings_by_name(bare("deit"), custom_keys={"pos_embed": dict(decay_mult=1.0)})
    assert kept["pos_embed"][1] == WEIGHT_DECAY and kept["cls_token"][1] == 0
    flat = settings_by_name(bare("xcit"), flat_decay_mult=0.0)
    assert {decay for name, (_, decay) in flat.items() if name.endswith(("gamma1", "bias"))} == {0.0}
    assert flat["xca_layers.0.attn.temperature"][1] == WEIGHT_DECAY  # [heads, 1, 1] is not flat


def test_frozen_and_shared_parameters():
    model = bare("vit", frozen_stages=2)
    found = settings_by_name(model)
    assert {int(name.split(".")[1]) for name in found if name.startswith("layers.")} == {2}
    shared = nn.ModuleDict({"backbone": bare("vit"), "head": nn.Linear(32, 32)})
    shared["twin"] = shared["head"]
    settings_by_name(shared)
    shared["last"] = nn.Linear(32, 32)
    shared["last"].weight = shared["head"].weight
    settings_by_name(shared)


def test_groups_are_few_and_logged_once(capsys):
    MMLogger.get_instance("test_groups_are_few_and_logged_once")
    optim_wrapper = wrapper(bare("vit"), norm_decay_mult=0.0, bias_decay_mult=0.0)
    output = capsys.readouterr().out
    assert output.count("Layer-wise learning-rate decay") == 1
    assert "depth 0: lr 6.25e-05, weight decay 0.05, tensors: 1, parameters: 24,576" in output
    # Stem and three blocks with and without decay; the final norm without.
    assert len(optim_wrapper.optimizer.param_groups) == output.count("depth") == 9


def test_without_weight_decay():
    optimizer = dict(optimizer=dict(type="SGD", lr=LR))
    constructor = LayerDecayOptimWrapperConstructor(optimizer, dict(layer_decay_rate=RATE))
    groups = constructor(bare("vit")).optimizer.param_groups
    assert len(groups) == 5 and {group["weight_decay"] for group in groups} == {0}


def test_a_backbone_without_layer_depth_is_a_clear_error():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 4, 3)

    with pytest.raises(ValueError, match=r"nothing in Plain has it \(backbone: Conv2d\)"):
        wrapper(Plain())


@pytest.mark.parametrize(
    ("optimizer", "paramwise_cfg", "match"),
    [
        (dict(), None, "needs layer_decay_rate"),
        (dict(), dict(layer_decay_rate=1.5), r"layer_decay_rate in \(0, 1\].* got 1.5"),
        (dict(), dict(layer_decay_rate=0.7, num_layers=12), "no option num_layers"),
        (dict(), dict(layer_decay_rate=0.7, custom_keys=dict(norm=dict(lr=1))), "'norm' has no option lr"),
        (dict(lr=None), dict(layer_decay_rate=0.7), "needs an lr"),
        (dict(weight_decay=None), dict(layer_decay_rate=0.7, flat_decay_mult=0.0), "flat_decay_mult needs a weight"),
        (dict(weight_decay=None), dict(layer_decay_rate=0.7, norm_decay_mult=0.0), "base_wd"),
    ],
)
def test_errors(optimizer, paramwise_cfg, match):
    settings = {"type": "AdamW", "lr": LR, "weight_decay": WEIGHT_DECAY, **optimizer}
    settings = {key: value for key, value in settings.items() if value is not None}
    with pytest.raises(ValueError, match=match):
        LayerDecayOptimWrapperConstructor(dict(optimizer=settings), paramwise_cfg)

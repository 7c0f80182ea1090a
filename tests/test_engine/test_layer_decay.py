"""Layer-wise learning-rate decay on our backbones, alone and inside the hosts' models."""

import mmpretrain.models  # noqa: F401
import pytest
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from torch import nn

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


def mask_rcnn(backbone):
    cfg = Config.fromfile(QUICKSTART)
    cfg.model.backbone = dict(backbone, out_type="featmap", out_indices=(2,))
    cfg.model.neck[0].update(in_channels=32, scales=(4, 2, 1, 0.5))
    cfg.model.neck[1].in_channels = [32] * 4
    with DefaultScope.overwrite_default_scope("mmdet"):
        return MODELS.build(cfg.model)


def wrapper(model, weight_decay=WEIGHT_DECAY, lr=LR, **paramwise_cfg):
    settings = {key: value for key, value in dict(lr=lr, weight_decay=weight_decay).items() if value is not None}
    cfg = dict(
        type="OptimWrapper",
        optimizer=dict(type="SGD" if None in (lr, weight_decay) else "AdamW", **settings),
        constructor="mmspectral.LayerDecayOptimWrapperConstructor",
        paramwise_cfg={"layer_decay_rate": RATE, **paramwise_cfg},
    )
    return build_optim_wrapper(model, cfg)


def settings_by_name(model, **paramwise_cfg):
    """Return {name: (lr, weight decay)}; every trainable parameter must be in exactly one group."""
    groups = wrapper(model, **paramwise_cfg).optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assigned = [parameter for group in groups for parameter in group["params"]]
    assert len(assigned) == len(set(assigned)) and set(assigned) == set(names)
    return {names[p]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def classifier(backbone):
    head = dict(type="LinearClsHead", num_classes=3, in_channels=32)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        return MODELS.build(dict(type="ImageClassifier", backbone=backbone, head=head))


@pytest.mark.parametrize("build", [MODELS.build, mask_rcnn, classifier], ids=["bare", "detector", "classifier"])
@pytest.mark.parametrize("name", BACKBONES)
def test_rates_fall_with_the_depth_that_the_backbone_says(name, build):
    model = build(BACKBONES[name])
    rates = {n: lr for n, (lr, _) in settings_by_name(model, norm_decay_mult=0.0).items()}
    prefix = "backbone." if hasattr(model, "backbone") else ""
    for parameter, lr in rates.items():
        depth, depths = getattr(model, "backbone", model).get_layer_depth(parameter, prefix)
        falls = depths - 1 - depth if parameter.startswith(prefix) else 0
        assert lr == pytest.approx(LR * RATE**falls, rel=1e-12), parameter
    assert len({lr for parameter, lr in rates.items() if parameter.startswith(prefix)}) >= 4


def test_distributed_wrappers_around_the_model_and_inside_it():
    """A child named ``module`` stands for DistributedDataParallel, which needs a process group."""
    plain = mask_rcnn(BACKBONES["vit"])
    expected = settings_by_name(plain)
    around = settings_by_name(nn.ModuleDict({"module": plain}))
    plain.backbone = nn.ModuleDict({"module": plain.backbone})  # as MMSeparateDistributedDataParallel does
    for found in (around, settings_by_name(plain)):
        assert {name.replace("module.", ""): value for name, value in found.items()} == expected


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
    kept = settings_by_name(MODELS.build(BACKBONES["deit"]), custom_keys={"pos_embed": dict(decay_mult=1.0)})
    assert kept["pos_embed"][1] == WEIGHT_DECAY and kept["cls_token"][1] == 0
    flat = settings_by_name(MODELS.build(BACKBONES["xcit"]), flat_decay_mult=0.0)
    assert {decay for name, (_, decay) in flat.items() if name.endswith(("gamma1", "bias"))} == {0.0}
    assert flat["xca_layers.0.attn.temperature"][1] == WEIGHT_DECAY  # [heads, 1, 1] is not flat


def test_frozen_and_shared_parameters():
    model = MODELS.build(dict(BACKBONES["vit"], frozen_stages=2))
    found = settings_by_name(model)
    assert {int(name.split(".")[1]) for name in found if name.startswith("layers.")} == {2}
    shared = nn.ModuleDict({"backbone": MODELS.build(BACKBONES["vit"]), "head": nn.Linear(32, 32)})
    shared["twin"] = shared["head"]
    settings_by_name(shared)
    shared["last"] = nn.Linear(32, 32)
    shared["last"].weight = shared["head"].weight
    settings_by_name(shared)


def test_groups_are_few_and_logged_once(capsys):
    MMLogger.get_instance("test_groups_are_few_and_logged_once")
    optim_wrapper = wrapper(MODELS.build(BACKBONES["vit"]), norm_decay_mult=0.0, bias_decay_mult=0.0)
    output = capsys.readouterr().out
    assert output.count("Layer-wise learning-rate decay") == 1
    assert "depth 0: lr 6.25e-05, weight decay 0.05, tensors: 1, parameters: 24,576" in output
    # Stem and three blocks with and without decay; the final norm without.
    assert len(optim_wrapper.optimizer.param_groups) == output.count("depth") == 9


def test_without_weight_decay():
    groups = wrapper(MODELS.build(BACKBONES["vit"]), weight_decay=None).optimizer.param_groups
    assert len(groups) == 5 and {group["weight_decay"] for group in groups} == {0}


def test_a_backbone_without_layer_depth_is_a_clear_error():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 4, 3)

    with pytest.raises(ValueError, match=r"nothing in Plain has it \(backbone: Conv2d\)"):
        wrapper(Plain())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (dict(layer_decay_rate=None), "needs layer_decay_rate"),
        (dict(layer_decay_rate=1.5), r"layer_decay_rate in \(0, 1\].* got 1.5"),
        (dict(num_layers=12), "no option num_layers"),
        (dict(custom_keys=dict(norm=dict(lr=1))), "'norm' has no option lr"),
        (dict(lr=None), "needs an lr"),
        (dict(weight_decay=None, flat_decay_mult=0.0), "flat_decay_mult needs a weight"),
        (dict(weight_decay=None, norm_decay_mult=0.0), "base_wd"),
    ],
)
def test_errors(settings, match):
    with pytest.raises(ValueError, match=match):
        wrapper(MODELS.build(BACKBONES["vit"]), **settings)

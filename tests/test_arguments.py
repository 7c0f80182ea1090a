"""Values that mean nothing are refused with the name of the argument, wherever the argument is ours."""

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from torch import nn

import mmspectral
from mmspectral import analysis, apis, checkpoints, layers, ops
from mmspectral.arguments import LARGEST, check, checked, either, listed, one_of, optional, real, whole
from mmspectral.registry import DATASETS, HOOKS, METRICS, MODELS, TRANSFORMS

HUGE = 10**30
WORDS = ("x", "10", "(", b"x", [1.5, "x"], [{}], {1: 1}, object())
NUMBERS = (True, -7, 1.5, HUGE, float("nan"), float("inf"))
VALUES = (*WORDS, *NUMBERS)
# What an argument takes of these values; None, where it is a default, is not tried.
NOTHING, ANY_BOOL, NEGATIVE, REAL, POSITIVE = (), (True,), (-7,), (-7, 1.5, HUGE), (1.5, HUGE)
IDENTITY = dict(type="IdentityCorrection", scale=1.0)
XCIT = dict(arch=dict(embed_dims=16, depth=2, num_heads=2), patch_size=8)
STAGES = dict(arch=dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8]))
VIT = dict(arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32), img_size=32, patch_size=8)
BACKBONE = dict(conditioning=NOTHING, out_indices=NOTHING, frozen_stages=NOTHING, with_cp=ANY_BOOL, init_cfg=NOTHING)


def attention():
    module = nn.Module()
    module.num_heads, module.qkv = 2, nn.Linear(8, 24)
    return module


def built(registry, name, **settings):
    return lambda **changed: registry.build(dict(type=name) | settings | changed)


def conditioning(name):
    return lambda **settings: layers.build_conditioning(dict(type=name, **settings))


def kernel(name):
    return lambda **settings: layers.build_kernel(dict(type=name, **settings), 2, 8)


def calibrate(**settings):
    qkv = torch.randn(3, 2, 1, 8, 4)
    return analysis.calibrate_geometry(*qkv, **dict(num_features=4, fit=None, scales=[1], strengths=[0]) | settings)


SCOPE = dict(scope=NOTHING, targets=NOTHING)
PATTERNS = dict(include=NOTHING, exclude=NOTHING, layout=NOTHING)
CASES = {
    "QKNorm": (conditioning("QKNorm"), dict(norm=NOTHING, eps=POSITIVE, targets=NOTHING)),
    "SpectralNorm": (conditioning("SpectralNorm"), dict(power_iterations=NOTHING, targets=NOTHING)),
    "SigmaReparam": (conditioning("SigmaReparam"), dict(gamma=POSITIVE, power_iterations=NOTHING)),
    "OrthogonalInit": (conditioning("OrthogonalInit"), dict(gain=POSITIVE)),
    "IdentityCorrection": (
        conditioning("IdentityCorrection"),
        dict(SCOPE, scale=REAL, preserve_function=ANY_BOOL, preserve_norm=POSITIVE),
    ),
    "SVDCorrection": (conditioning("SVDCorrection"), dict(SCOPE, interval=NOTHING, preserve_function=NOTHING)),
    "PolarCorrection": (conditioning("PolarCorrection"), dict(SCOPE, interval=NOTHING, kappa=(1.5,))),
    "RandomFeatureKernel": (
        lambda **settings: layers.RandomFeatureKernel(2, 8, **settings),
        dict(num_features=NOTHING, geometry=NOTHING, sharing=NOTHING, rank=NOTHING, proposal=NOTHING, shift=NOTHING)
        | dict(orthogonal=ANY_BOOL, train_features=ANY_BOOL, seed=NEGATIVE),
    ),
    "constant": (kernel("constant"), dict(num_features=NOTHING, seed=NEGATIVE)),
    "DarkAttention": (
        lambda **settings: layers.DarkAttention(**dict(dim=16, num_heads=2) | settings),
        dict(dim=NOTHING, num_heads=NOTHING, qkv_bias=ANY_BOOL, kernel=NOTHING, num_kv_heads=NOTHING)
        | dict(context_dim=NOTHING, proj_bias=ANY_BOOL, proj_drop=NOTHING, layer=NOTHING),
    ),
    "condition": (
        lambda **settings: mmspectral.condition(attention(), **dict(conditioning=IDENTITY) | settings),
        dict(PATTERNS, conditioning=NOTHING),
    ),
    "sites": (lambda **settings: mmspectral.sites(attention(), **settings), PATTERNS),
    "fold": (lambda **settings: mmspectral.fold(attention(), **settings), dict(keep=ANY_BOOL)),
    "layout": (
        lambda **layout: mmspectral.sites(attention(), ["qkv"], layout=layout),
        dict(roles=NOTHING, num_heads=NOTHING, row_order=NOTHING),
    ),
    "ProjectionLayout": (
        lambda **settings: ops.ProjectionLayout(**dict(roles=["q"], num_heads=2) | settings),
        dict(roles=NOTHING, num_heads=NOTHING, row_order=NOTHING),
    ),
    "probe_tokens": (
        lambda **settings: layers.probe_tokens(**dict(num_tokens=2, dim=4, correlation=0.5) | settings),
        dict(num_tokens=NOTHING, dim=NOTHING, correlation=NOTHING, seed=NEGATIVE),
    ),
    "SpectralXCiT": (
        built(MODELS, "mmspectral.SpectralXCiT", **XCIT),
        dict(BACKBONE, patch_size=NOTHING, class_attention_conditioning=NOTHING, out_type=NOTHING)
        | dict(norm_eval=ANY_BOOL, bn_norm_cfg=NOTHING),
    ),
    "SpectralSwin": (built(MODELS, "mmspectral.SpectralSwin", **STAGES), dict(BACKBONE, pad_small_map=ANY_BOOL)),
    "SpectralDaViT": (
        built(MODELS, "mmspectral.SpectralDaViT", **STAGES),
        dict(BACKBONE, channel_conditioning=NOTHING, pad_small_map=ANY_BOOL, stem_padding=NOTHING)
        | dict(gap_before_final_norm=ANY_BOOL),
    ),
    "SpectralViT": (built(MODELS, "mmspectral.SpectralViT", **VIT), dict(BACKBONE, pretrained_grid=NOTHING)),
    "SpectralDeiT": (built(MODELS, "mmspectral.SpectralDeiT", **VIT), dict(distillation=ANY_BOOL)),
    "DarkViT": (
        built(MODELS, "mmspectral.DarkViT", **dict(VIT, kernel=dict(type="dark", num_features=4))),
        dict(BACKBONE, kernel=NOTHING, trainable=NOTHING),
    ),
    "ConditionedModel": (
        built(MODELS, "mmspectral.ConditionedModel", model_type="mmspectral.SpectralViT", conditioning=IDENTITY, **VIT),
        PATTERNS,
    ),
    "Feature2Pyramid": (
        built(MODELS, "mmspectral.Feature2Pyramid", in_channels=8, norm_cfg=dict(type="BN")),
        dict(in_channels=NOTHING, scales=NOTHING, norm_cfg=NOTHING, from_last_map=ANY_BOOL, halve_channels=ANY_BOOL),
    ),
    "ConditioningHook": (
        built(HOOKS, "mmspectral.ConditioningHook"),
        dict(interval=NOTHING, by_epoch=ANY_BOOL, layers=("x", "10"), max_layers=NOTHING, statistics=NOTHING)
        | dict(max_samples=NOTHING, max_tokens=NOTHING),
    ),
    "FeatureRedrawHook": (
        built(HOOKS, "mmspectral.FeatureRedrawHook", interval=1),
        dict(interval=NOTHING, by_epoch=ANY_BOOL),
    ),
    "DarkCalibrationHook": (
        built(HOOKS, "mmspectral.DarkCalibrationHook"),
        dict.fromkeys(("num_batches", "batch_size", "num_tokens", "fit_steps", "seed"), NOTHING),
    ),
    "NonFiniteGuardHook": (built(HOOKS, "mmspectral.NonFiniteGuardHook"), dict(max_skipped=NOTHING)),
    "CheckpointFittingHook": (built(HOOKS, "mmspectral.CheckpointFittingHook"), dict(min_matched=NOTHING)),
    "CheckpointHook": (
        built(HOOKS, "mmspectral.CheckpointHook"),
        dict.fromkeys(("interval", "max_keep_ckpts", "backend_args", "tolerated_failures"), NOTHING),
    ),
    "ShapesDataset": (
        built(DATASETS, "mmspectral.ShapesDataset", lazy_init=True),
        dict.fromkeys(("split", "num_images", "image_size", "seed"), NOTHING),
    ),
    "LoadImageFromFile": (built(TRANSFORMS, "mmspectral.LoadImageFromFile"), dict(skip_unreadable=ANY_BOOL)),
    "CocoMetric": (built(METRICS, "mmspectral.CocoMetric"), dict(metric=NOTHING)),
    "calibrate_geometry": (
        calibrate,
        dict(num_features=NOTHING, sharp=ANY_BOOL, shift=ANY_BOOL, rank=NOTHING, shared=ANY_BOOL)
        | dict(scales=NOTHING, strengths=NOTHING, draws=NOTHING, seed=NEGATIVE),
    ),
    "calibrate_model": (
        lambda **settings: analysis.calibrate_model(nn.Identity(), [], **settings),
        dict(num_tokens=NOTHING),
    ),
    "Fit": (analysis.Fit, dict(steps=NOTHING, lr=POSITIVE, shift=ANY_BOOL)),
    "JacobianSettings": (
        lambda **settings: analysis.JacobianSettings("attn", **settings),
        dict(num_tokens=NOTHING, head_dims=NOTHING, correlation=NOTHING),
    ),
    "spread": (lambda **settings: analysis.spread("abc", **dict(count=2) | settings), dict(count=NOTHING)),
    "predict": (
        lambda **settings: apis.predict(None, "", [], None, **settings),
        dict(batch_size=NOTHING, score_thr=NOTHING, pictures=NOTHING),
    ),
    "export": (
        lambda **settings: apis.export(None, "", None, "onnx", **settings),
        dict(size=NOTHING, fixed_size=NOTHING, force=NOTHING),
    ),
    "load_backbone": (
        lambda **settings: checkpoints.load_backbone(None, "", **settings),
        dict(min_matched=NOTHING, trained_with_conditioning=NOTHING),
    ),
}
REFUSED_AS_A_WHOLE = ("calibrate_model", "predict", "export", "load_backbone")  # these would need more to run


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_what_means_nothing_is_refused_by_name(case):
    build, arguments = CASES[case]
    for name, taken in arguments.items():
        for value in VALUES:
            if any(value is one for one in taken):
                build(**{name: value})
            elif not (case in REFUSED_AS_A_WHOLE and value is True):
                with pytest.raises((ValueError, TypeError, KeyError), match=name):
                    build(**{name: value})


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("IdentityCorrection", dict(scale=np.float32(0.5), targets=("q", "v"), preserve_function=np.bool_(True))),
        ("SVDCorrection", dict(interval=np.int64(3))),
        ("RandomFeatureKernel", dict(num_features=np.int32(4), seed=np.int64(3))),
        ("sites", dict(include=("qkv",), layout=ConfigDict(row_order="[3][heads][d]", num_heads=np.int64(2)))),
        ("SpectralViT", dict(out_indices=np.int64(0), frozen_stages=np.int8(0), conditioning=ConfigDict(IDENTITY))),
        ("SpectralSwin", dict(out_indices=(np.int64(0), 2), arch=ConfigDict(STAGES["arch"]))),
        ("Feature2Pyramid", dict(in_channels=np.int64(8), scales=[np.float64(0.5), 4])),
        ("ConditioningHook", dict(interval=np.int64(2), statistics=["spectrum"])),
        ("ShapesDataset", dict(num_images=np.int64(2))),
    ],
)
def test_numbers_of_numpy_tuples_and_config_dicts_are_taken(case, settings):
    CASES[case][0](**settings)


def test_kinds():
    kinds = {
        whole(1, 8): r"an integer in \[1, 8\]",
        whole(1): "a positive integer",
        real(above=0): "a finite number greater than 0",
        one_of("q", None): "one of 'q', None",
        listed(whole(), 2, 2): "a list of 2 values, each an integer",
        optional(either(whole(0), one_of("same"))): "None or an integer of at least 0 or one of 'same'",
    }
    for kind, text in kinds.items():
        with pytest.raises(ValueError, match=f"^f: x must be {text}, got "):
            check("f: x", [[]] * 1000, kind)
    assert check("x", np.int64(LARGEST), whole()) == LARGEST and type(check("x", np.float32(2), real())) is float
    with pytest.raises(ValueError, match="x must be"):
        check("x", LARGEST + 1, whole())


def test_a_call_that_does_not_fit_is_reported_by_the_function():
    @checked(x=whole())
    def function(x, y=1):
        return x, y

    assert function(np.int8(3), y=None) == (3, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        function(1, z=2)

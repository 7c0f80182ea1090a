"""Every shipped config loads, dumps, reloads, builds, and means the same by path and by ``mmspectral::``."""

import copy
import functools
import re
import sys
from pathlib import Path

import mmengine.runner  # noqa: F401 - fills the root registries
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, MODELS, OPTIM_WRAPPERS, PARAM_SCHEDULERS, VISUALIZERS, init_default_scope
from torch.overrides import TorchFunctionMode

import mmspectral
from mmspectral.engine import check_config, runtime_notes
from mmspectral.layers import corrected_parameters
from mmspectral.models.backbones import (
    DarkDeiT,
    DarkSwin,
    DarkViT,
    SpectralDaViT,
    SpectralDeiT,
    SpectralSwin,
    SpectralViT,
    SpectralXCiT,
)
from tests.helpers import ROOT, output_of, run_python

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if not {"_base_", "examples"} & set(p.parts))
NAMES = [str(p.relative_to(ROOT / "configs")) for p in CONFIGS]
CONDITIONED = [name for name in NAMES if "spectral-" in name]
DARK = [name for name in NAMES if "dark-" in name]
TWINS = [name for name in NAMES if "spectral-" not in name and not name.startswith("dark/")]
OTHER_MODELS = [name for name in NAMES if name.startswith("any_model/")]
SHARDED = "xcit/spectral-xcit-medium-24-p16_8xb128-fsdp_in1k.py"
BACKBONES = dict(xcit=SpectralXCiT, swin=SpectralSwin, vit=SpectralViT, deit=SpectralDeiT, davit=SpectralDaViT)
DARK_BACKBONES = {"dark-deit": DarkDeiT, "dark-swin": DarkSwin, "dark-vit": DarkViT}
# Cross-covariance attention bears the paper's lambda; dot-product attention starts one-hot under it.
SCALES = {"xcit": 10.0, "swin": 1.0, "vit": 1.0, "deit": 1.0, "davit": 1.0}
# Of each family a classifier and a detector, and what is unlike the others; the rest is slow.
TYPICAL = [
    "any_model/mask2former_r50_spectral-decoder_8xb2-lsj-50e_coco.py",
    "davit/mask-rcnn_spectral-davit-s_fpn_ms-crop-1x_coco.py",
    "davit/spectral-davit-tiny_4xb256_in1k.py",
    "dark/dark-deit-small_ft-30e-projections_8xb128_in1k.py",
    "dark/mask-rcnn_dark-swin-t-p4_fpn_1x_coco.py",
    "dark/mask-rcnn_dark-vit-d128-p8_fpn_shapes-512.py",
    "deit/spectral-deit-base-distilled_16xb64_in1k.py",
    "quickstart/mask-rcnn_spectral-swin-d48_fpn_shapes.py",
    "quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_coco.py",
    "swin/cascade-mask-rcnn_spectral-swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py",
    "swin/spectral-swin-small_16xb64_in1k.py",
    "vit/mask-rcnn_spectral-vit-base-p16_fpn_16xb4-lsj-100e_coco.py",
    "vit/spectral-vit-tiny-p16_32xb128_in1k.py",
    "xcit/mask-rcnn_spectral-xcit-s12-p8_fpn_ms-crop-3x_coco.py",
    "xcit/spectral-xcit-small-12-p16_8xb128_in1k.py",
]
EVERY = pytest.mark.parametrize("name", NAMES)


EACH_KIND = pytest.mark.parametrize(
    "name", [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)


class Meta(TorchFunctionMode):
    """The meta device, but for ``torch.linspace``: stock backbones read rates of drop path off it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if func is torch.linspace else {})})


@functools.cache
def load(name):
    """Return a config; nobody may change it."""
    return Config.fromfile(ROOT / "configs" / name)


def family(name):
    folder = name.partition("/")[0]
    return next(f for f in BACKBONES if f"{f}-" in name) if folder == "quickstart" else folder


def without_scope(value):
    if isinstance(value, dict):
        return {k: without_scope(v) for k, v in value.items() if k != "_scope_"}
    return [without_scope(v) for v in value] if isinstance(value, (list, tuple)) else value


def build_model(cfg):
    """Build without weights: on the meta device, from scratch instead of from a checkpoint."""
    init_default_scope(cfg.default_scope)
    model = copy.deepcopy(cfg.model)  # detectors write into what they are built from
    model.backbone.init_cfg = None
    with torch.device("meta"), Meta():
        return MODELS.build(model)


def backbone_class(name):
    dark = re.search("dark-(?:deit|swin|vit)", name.replace("softmax-", "dark-"))
    return DARK_BACKBONES[dark[0]] if dark else BACKBONES[family(name)]


def optimizer_groups(cfg, model):
    settings = copy.deepcopy(cfg.optim_wrapper)
    settings.type = "OptimWrapper"  # that of mixed precision needs a GPU
    return build_optim_wrapper(model, settings).param_groups


def parameters_by_name():
    metafiles = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*/metafile.yml")]
    models = [model for metafile in metafiles for model in metafile["Models"]]
    return {model["Config"].partition("/")[2]: model["Metadata"].get("Parameters") for model in models}


@EACH_KIND
def test_builds_what_it_says(name):
    """The class, its size as the metafile has it, what is conditioned, and an optimizer that holds every parameter."""
    cfg = load(name)
    check_config(cfg)
    model = build_model(cfg)
    stated = parameters_by_name().get(name)
    assert stated in (None, sum(p.numel() for p in model.parameters()))
    if name in OTHER_MODELS:
        assert any(corrected_parameters(module) for module in model.modules())
    else:
        assert type(model.backbone) is backbone_class(name)
        assert stated is not None
        assert (model.backbone.conditioning is not None) == ("spectral-" in name)
    assert OPTIM_WRAPPERS.get(cfg.optim_wrapper.get("type", "OptimWrapper")) is not None
    held = [id(p) for group in optimizer_groups(cfg, model) for p in group["params"]]
    assert len(held) == len(set(held))
    assert {id(p) for p in model.parameters() if p.requires_grad} <= set(held)


@EACH_KIND
def test_means_the_same_through_the_package_name(name, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(f"_base_ = 'mmspectral::{name}'\n")
    by_scope = Config.fromfile(child)
    child.write_text(f"_base_ = __import__('mmspectral').config_path({name!r})\n")
    by_path = Config.fromfile(child)
    assert without_scope(by_scope.to_dict()) == without_scope(by_path.to_dict()) == without_scope(load(name).to_dict())
    same = [{k: v.shape for k, v in build_model(cfg).state_dict().items()} for cfg in (by_scope, by_path)]
    assert same[0] == same[1]
    for cfg in (load(name), by_scope):
        everything_but_the_model_builds(cfg)


def test_the_package_name_needs_no_package_beside_its_metadata(tmp_path):
    """An editable install has its metadata in site-packages and nothing else there."""
    metadata = tmp_path / "mmspectral-9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mmspectral\nVersion: 9\n")
    (tmp_path / "child.py").write_text(f"_base_ = 'mmspectral::{NAMES[-1]}'\n")
    code = "import mmspectral, mmengine; print('type', mmengine.Config.fromfile('child.py').model.backbone.type)"
    assert "type mmspectral.SpectralXCiT\n" in output_of(sys.executable, "-c", code, cwd=tmp_path)


def everything_but_the_model_builds(cfg):
    """Pipelines, samplers, schedulers and hooks, also with the scope that ``mmspectral::`` stamps on them."""
    init_default_scope(cfg.default_scope)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=cfg.optim_wrapper.optimizer.lr)
    schedulers = cfg.param_scheduler
    for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
        settings = dict(scheduler, optimizer=optimizer)
        settings.pop("convert_to_iter_based", None)
        PARAM_SCHEDULERS.build(settings)
    VISUALIZERS.build(dict(copy.deepcopy(cfg.visualizer), name="configs"))  # which hooks that draw ask for
    for hook in [*cfg.default_hooks.values(), *cfg.get("custom_hooks", [])]:
        HOOKS.build(hook)
    for part in ("train", "val", "test"):
        dataset = cfg[f"{part}_dataloader"].dataset
        if "Shapes" in dataset.type:
            continue  # built for real in tests/test_datasets and the quick start
        DATASETS.build(lazily(dataset))


def lazily(dataset):
    """Let a dataset, and those that it wraps, be built without reading files."""
    inner = {"dataset": lazily(dataset["dataset"])} if "dataset" in dataset else {}
    return dict(dataset, lazy_init=True, **inner)


def differing(a, b, path=""):
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for key in sorted({*a, *b}) for d in differing(a.get(key), b.get(key), f"{path}.{key}")]
    return [] if a == b else [path]


@pytest.mark.parametrize("name", TWINS)
def test_twins_differ_only_in_conditioning_and_start(name):
    (conditioned,) = [other for other in CONDITIONED if other.replace("spectral-", "") == name]
    found = differing(load(name).to_dict(), load(conditioned).to_dict())
    assert set(found) <= {".model.backbone.conditioning", ".model.backbone.init_cfg.checkpoint", ".pretrained"}
    assert ".model.backbone.conditioning" in found


@pytest.mark.parametrize("name", DARK)
def test_softmax_twins_differ_only_in_the_kernel(name):  # a missing one cannot be loaded
    twin = load(name.replace("dark-", "softmax-"))
    assert differing(load(name).to_dict(), twin.to_dict()) == [".model.backbone.kernel"]
    assert twin.model.backbone.kernel is None


@pytest.mark.parametrize("name", [n for n in DARK if "shapes" not in n])
def test_kernels_move_slowly_and_are_not_decayed(name):
    cfg = load(name)
    model = build_model(cfg)
    group_of = {id(p): group for group in optimizer_groups(cfg, model) for p in group["params"]}
    found = dict(model.backbone.named_parameters())
    matrix = next(name for name in found if name.endswith(".kernel.M"))
    kernel, qkv = (group_of[id(found[n])] for n in (matrix, matrix.replace("kernel.M", "qkv.weight")))
    assert kernel["weight_decay"] == 0 < qkv["weight_decay"]
    assert kernel["lr"] == pytest.approx(0.1 * qkv["lr"])


def test_every_conditioned_config_has_a_twin():
    alone = [n for n in CONDITIONED if n.replace("spectral-", "") not in NAMES]
    quickstart = [n for n in alone if n.startswith("quickstart/")]
    assert all("coco" in name for name in quickstart)
    assert sorted(set(alone) - set(quickstart)) == sorted([*OTHER_MODELS, SHARDED])


@pytest.mark.parametrize("name", [name for name in CONDITIONED if name not in OTHER_MODELS])
def test_scale_of_each_family(name):
    assert load(name).model.backbone.conditioning == dict(
        type="IdentityCorrection", scale=SCALES[family(name)], scope="full"
    )


@EVERY
def test_every_config_but_the_sharded_one_resumes_exactly(name):
    cfg = load(name)
    if name == SHARDED:
        assert {hook.type.partition(".")[0] for hook in cfg.default_hooks.values()}.isdisjoint({"mmspectral"})
        return
    assert runtime_notes(cfg) == []
    assert not cfg.train_dataloader.get("persistent_workers")
    assert cfg.train_pipeline[0].type == "mmspectral.LoadImageFromFile"


@EVERY
def test_batch_in_the_name_is_that_of_the_learning_rate(name):
    cfg = load(name)
    stated = re.search(r"_(\d+)xb(\d+)[_-]", name)
    if name.endswith("in1k.py"):
        assert stated, "mmpretrain's names tell GPUs and images per GPU"
    if stated:
        gpus, images = map(int, stated.groups())
        assert cfg.train_dataloader.batch_size == images
        assert cfg.auto_scale_lr.base_batch_size == gpus * images
    elif "shapes" not in name and "quickstart" not in name:
        assert cfg.auto_scale_lr.base_batch_size == 8 * cfg.train_dataloader.batch_size == 16


@pytest.mark.parametrize("name", [n for n in CONDITIONED if n.endswith("coco.py") and n.partition("/")[0] in BACKBONES])
def test_start_of_a_detector_is_the_checkpoint_that_its_classifier_writes(name):
    """The classifier has the same architecture, and its last epoch is the one named."""
    cfg = load(name)
    work_dir, epoch = re.fullmatch(r"work_dirs/(.+)/epoch_(\d+)\.pth", cfg.model.backbone.init_cfg.checkpoint).groups()
    classifier = load(f"{family(name)}/{work_dir}.py")
    assert classifier.train_cfg.max_epochs == int(epoch)
    backbone, start = cfg.model.backbone, classifier.model.backbone
    for key in ("type", "arch", "patch_size", "conditioning", "channel_conditioning", "stem_padding"):
        assert backbone.get(key) == start.get(key), key


@pytest.mark.parametrize("name", [n for n in TWINS if n.endswith("coco.py") and n.partition("/")[0] in BACKBONES])
def test_start_of_a_stock_detector_holds_no_conditioned_weights(name):
    start = load(name).model.backbone.init_cfg.checkpoint
    assert "spectral" not in start
    size = re.search(r"(?:swin|davit|vit|xcit)-([a-z]+)", name)[1]
    long = {"t": "tiny", "s": "small", "b": "base", "m": "medium"}.get(size[0])
    assert long in start


def test_vitdet_decays_the_learning_rate_from_the_heads_to_the_stem():
    """arXiv 2203.16527, appendix: rate .7 over 12 blocks; positions are not decayed."""
    cfg = load("vit/mask-rcnn_spectral-vit-base-p16_fpn_16xb4-lsj-100e_coco.py")
    model = build_model(cfg)
    group_of = {id(p): group for group in optimizer_groups(cfg, model) for p in group["params"]}
    expected = {
        "backbone.pos_embed": (0.7**13, 0.0),
        "backbone.layers.0.attn.qkv.weight": (0.7**12, 0.1),
        "backbone.layers.11.attn.qkv.weight": (0.7, 0.1),
        "backbone.layers.11.ln1.weight": (0.7, 0.0),
        "neck.1.lateral_convs.0.conv.weight": (1.0, 0.1),
        "rpn_head.rpn_cls.weight": (1.0, 0.1),
    }
    parameters = dict(model.named_parameters())
    for name, (factor, weight_decay) in expected.items():
        group = group_of[id(parameters[name])]
        assert group["lr"] == pytest.approx(1e-4 * factor), name
        assert group["weight_decay"] == weight_decay, name


@EVERY
def test_pipeline_of_each_child_is_the_one_the_loader_uses(name):
    """A child that changes ``train_pipeline`` must change the dataloader's."""
    cfg = load(name)
    dataset = cfg.train_dataloader.dataset
    dataset = dataset.get("dataset", dataset)
    assert without_scope(cfg.train_pipeline) == without_scope(dataset.pipeline)


def test_config_path_works_from_any_directory_and_says_what_there_is(tmp_path):
    result = run_python(f"import mmspectral; print(mmspectral.config_path({NAMES[0]!r}))", cwd=tmp_path)
    assert Path(result.stdout.strip()).is_file(), result.stderr
    with pytest.raises(FileNotFoundError, match="no config 'xcit/absent.py'.*spectral-xcit-small-12"):
        mmspectral.config_path("xcit/absent.py")

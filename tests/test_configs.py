"""Every shipped config loads, dumps, reloads, builds, and means the same by path and by ``mmspectral::``."""

import subprocess
import sys
from pathlib import Path

import mmengine.runner  # noqa: F401 - fills the root registries
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, HOOKS, MODELS, OPTIM_WRAPPERS, PARAM_SCHEDULERS, init_default_scope

import mmspectral

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if "_base_" not in p.parts)
NAMES = [str(p.relative_to(ROOT / "configs")) for p in CONFIGS]
CONDITIONED = [name for name in NAMES if "spectral-" in name]
EVERY = pytest.mark.parametrize("name", NAMES)


def load(name):
    return Config.fromfile(ROOT / "configs" / name)


def without_scope(value):
    if isinstance(value, dict):
        return {k: without_scope(v) for k, v in value.items() if k != "_scope_"}
    return [without_scope(v) for v in value] if isinstance(value, (list, tuple)) else value


def build_model(cfg, **overrides):
    """Build without weights: on the meta device, from scratch instead of from a checkpoint."""
    init_default_scope(cfg.default_scope)
    model = cfg.model.copy()
    model["backbone"] = dict(model["backbone"], init_cfg=None, **overrides)
    with torch.device("meta"):
        return MODELS.build(model)


@EVERY
def test_dumps_reloads_and_builds(name, tmp_path):
    cfg = load(name)
    cfg.dump(tmp_path / "dumped.py")
    again = Config.fromfile(tmp_path / "dumped.py")
    assert again.to_dict() == cfg.to_dict()
    model = build_model(again)
    assert type(model.backbone).__name__ == "SpectralXCiT"
    assert (model.backbone.conditioning is not None) == ("spectral-" in name)


@EVERY
def test_means_the_same_through_the_package_name(name, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(f"_base_ = 'mmspectral::{name}'\n")
    by_scope = Config.fromfile(child)
    child.write_text(f"_base_ = __import__('mmspectral').config_path({name!r})\n")
    by_path = Config.fromfile(child)
    assert without_scope(by_scope.to_dict()) == without_scope(by_path.to_dict()) == without_scope(load(name).to_dict())
    same = [{k: v.shape for k, v in build_model(cfg).state_dict().items()} for cfg in (by_scope, by_path)]
    assert same[0] == same[1]


@EVERY
def test_everything_in_it_builds(name, tmp_path):
    """Pipelines, schedulers, hooks and optimizer, also with the scope that ``mmspectral::`` stamps on them."""
    child = tmp_path / "child.py"
    child.write_text(f"_base_ = 'mmspectral::{name}'\n")
    for cfg in (load(name), Config.fromfile(child)):
        init_default_scope(cfg.default_scope)
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=cfg.optim_wrapper.optimizer.lr)
        assert OPTIM_WRAPPERS.get(cfg.optim_wrapper.type) is not None
        for scheduler in cfg.param_scheduler:
            settings = dict(scheduler, optimizer=optimizer)
            settings.pop("convert_to_iter_based", None)
            PARAM_SCHEDULERS.build(settings)
        for hook in cfg.get("custom_hooks", []):
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


@pytest.mark.parametrize("name", [n for n in NAMES if "spectral-" not in n])
def test_twins_differ_only_in_conditioning_and_start(name):
    folder, _, file = name.rpartition("/")
    prefix, _, rest = file.rpartition("xcit-")
    twin = load(f"{folder}/{prefix}spectral-xcit-{rest}")
    found = differing(load(name).to_dict(), twin.to_dict())
    assert set(found) <= {".model.backbone.conditioning", ".model.backbone.init_cfg.checkpoint", ".pretrained"}
    assert ".model.backbone.conditioning" in found


def test_every_conditioned_config_has_a_twin_or_is_a_template():
    alone = [n for n in CONDITIONED if n.replace("spectral-", "") not in NAMES]
    assert all(word in name for name in alone for word in ["coco"] if "quickstart" in name)
    assert [n for n in alone if "quickstart" not in n] == ["xcit/mask-rcnn_spectral-xcit-s12-p16_fpn_custom-classes.py"]


@pytest.mark.parametrize("name", CONDITIONED)
def test_conditioning_is_written_in_each_config(name):
    assert 'conditioning=dict(type="IdentityCorrection", scale=10.0' in (ROOT / "configs" / name).read_text()


def test_custom_classes_reach_both_heads():
    cfg = load("xcit/mask-rcnn_spectral-xcit-s12-p16_fpn_custom-classes.py")
    assert cfg.model.roi_head.bbox_head.num_classes == cfg.model.roi_head.mask_head.num_classes == len(cfg.classes)
    for part in ("train", "val", "test"):
        assert cfg[f"{part}_dataloader"].dataset.metainfo.classes == cfg.classes
    assert cfg.val_evaluator.ann_file.endswith(cfg.val_ann)


def test_pipeline_of_each_child_is_the_one_the_loader_uses():
    """users.md B7: a child that changes ``train_pipeline`` must change the dataloader's."""
    for name in NAMES:
        cfg = load(name)
        dataset = cfg.train_dataloader.dataset
        dataset = dataset.get("dataset", dataset)
        assert without_scope(cfg.train_pipeline) == without_scope(dataset.pipeline), name


def test_config_path_works_from_any_directory_and_says_what_there_is(tmp_path):
    """users.md B3."""
    result = subprocess.run(
        [sys.executable, "-c", f"import mmspectral; print(mmspectral.config_path({NAMES[0]!r}))"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**__import__("os").environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert Path(result.stdout.strip()).is_file(), result.stderr
    with pytest.raises(FileNotFoundError, match="no config 'xcit/absent.py'.*spectral-xcit-small-12"):
        mmspectral.config_path("xcit/absent.py")

"""train.py, test.py and print_config.py: their flags, and what they change in a config."""

import argparse
import os
import pickle
import re
import shutil

import pytest
import torch
from mmengine.config import Config

from mmspectral.arguments import add_run_arguments, host_package, read_config, set_loading
from mmspectral.compat.checkpoints import FORCE_SAFE, FORCE_UNSAFE
from mmspectral.engine import predictions_writer, show_predictions, use_test_time_augmentation
from mmspectral.engine.launch import adapt_to_cpu
from mmspectral.errors import UsageError
from tests.helpers import TOOLS, TOY, Call, log_lines, run_python


def scalars(work_dir):
    """The logged training steps of the newest run in ``work_dir``, by iteration."""
    return {row["iter"]: (row["lr"], row["loss"]) for row in log_lines(work_dir, '"loss"')}


def test_amp_trains_in_float32_without_a_gpu_and_says_so(trained):
    folder, output = trained
    assert output.count("AmpOptimWrapper was replaced by OptimWrapper") == 1
    assert set(scalars(folder)) == {1, 2}
    assert "accuracy/top1" in output


def test_resumed_training_equals_uninterrupted_training(run_tool, toy_config, trained, tmp_path):
    longer = ["--cfg-options", "train_cfg.max_iters=4"]
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    assert run_tool("train.py", toy_config, "--work-dir", uninterrupted, *longer).returncode == 0
    shutil.copytree(trained[0], resumed)
    result = run_tool("train.py", toy_config, "--work-dir", resumed, "--resume", *longer)
    assert result.returncode == 0, result.stderr
    expected = scalars(uninterrupted)
    assert scalars(resumed) == {iteration: expected[iteration] for iteration in (3, 4)}


def test_test_writes_predictions_and_pictures_and_merges_views(run_tool, toy_config, trained, tmp_path):
    pictures = tmp_path / "pictures"
    scores = {}
    for name, flags in dict(plain=["--show-dir", pictures], merged=["--tta"]).items():
        out = tmp_path / f"{name}.pkl"
        arguments = [toy_config, trained[0] / "iter_2.pth", "--work-dir", tmp_path / name, "--out", out, *flags]
        result = run_tool("test.py", *arguments)
        assert result.returncode == 0, result.stderr
        assert "accuracy/top1" in result.stdout + result.stderr
        scores[name] = torch.stack([prediction["pred_score"] for prediction in pickle.loads(out.read_bytes())])
    assert len(list(pictures.glob("*.png"))) == 16
    assert scores["merged"].shape == scores["plain"].shape == (16, 2)
    assert not torch.equal(scores["merged"], scores["plain"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--resume", "attack.pth"], "attack.pth.*--trust-checkpoint"),
        (["--launcher", "pytorch"], "WORLD_SIZE"),
        (["--auto-scale-lr", "--cfg-options", "auto_scale_lr=None"], "base_batch_size"),
    ],
)
def test_what_training_refuses_is_named_in_one_line(run_tool, toy_config, tmp_path, arguments, named):
    torch.save(dict(state_dict={}, meta=Call(os.mkdir, str(tmp_path / "ran"))), tmp_path / "attack.pth")
    result = run_tool("train.py", toy_config, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert re.match(f"train.py: error: .*{named}", result.stderr.splitlines()[-1])
    assert "Traceback" not in result.stderr and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("train.py", ["nowhere.py"]),
        ("train.py", ["mmspectral::nowhere.py"]),
        ("train.py", ["CONFIG", "--resume", "nowhere.pth"]),
        ("test.py", ["CONFIG", "nowhere.pth"]),
        ("misc/print_config.py", ["nowhere.py"]),
    ],
)
def test_a_mistyped_path_is_named_before_heavy_imports(toy_config, tool, arguments):
    arguments = [tool, *(toy_config if argument == "CONFIG" else argument for argument in arguments)]
    code = (
        f"import runpy, sys; sys.argv = {arguments!r}\n"
        f"try: runpy.run_path({str(TOOLS / tool)!r}, run_name='__main__')\n"
        "except SystemExit as stopped: print(stopped.code, {'torch', 'mmdet', 'mmpretrain'} & sys.modules.keys())\n"
    )
    result = run_python(code)
    assert result.stdout.splitlines()[-1] == "2 set()"
    assert re.search("error: .*nowhere", result.stderr.splitlines()[-1])


def test_warnings_are_in_the_log(run_tool, toy_config, tmp_path):
    backbone = dict(type="mmspectral.SpectralViT", conditioning=dict(type="IdentityCorrection", scale=10.0))
    (tmp_path / "config.py").write_text(f"_base_ = {toy_config!r}\nmodel = dict(backbone={backbone})\n")
    result = run_tool("train.py", tmp_path / "config.py", "--work-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "WARNING - " in (log := next(tmp_path.glob("run/*/*.log")).read_text()) and "saturat" in log.lower()


def test_print_config_resolves_inheritance_and_options(run_tool, toy_config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOY)
    (tmp_path / "child.py").write_text(f"_base_ = {toy_config!r}\ntrain_cfg = dict(max_iters=5)\n")
    saved = tmp_path / "saved" / "resolved.py"
    options = ["--cfg-options", "optim_wrapper.optimizer.lr=0.5"]
    result = run_tool("misc/print_config.py", tmp_path / "child.py", *options, "--save-path", saved)
    assert result.returncode == 0, result.stderr
    printed = Config.fromstring(result.stdout, ".py")
    assert (printed.train_cfg.max_iters, printed.train_cfg.val_interval) == (5, 2)
    assert printed.optim_wrapper.optimizer.lr == 0.5
    assert Config.fromfile(saved).to_dict() == printed.to_dict()


def test_shipped_configs_are_found_by_name():
    name = "quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"
    assert read_config(f"mmspectral::{name}", {"model.type": "FasterRCNN"}).model.type == "FasterRCNN"
    with pytest.raises(UsageError, match="mask-rcnn_spectral-xcit-d128-p8_fpn_shapes"):
        read_config("mmspectral::quickstart/mask-rcnn.py")


@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
def test_both_spellings_of_local_rank(spelling):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    assert parser.parse_args(["config.py", f"{spelling}=3"]).local_rank == 3


@pytest.mark.parametrize(("flags", "switch"), [([], FORCE_SAFE), (["--trust-checkpoint"], FORCE_UNSAFE)])
def test_checkpoints_are_read_safely_unless_trusted(loaders, flags, switch):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    set_loading(parser.parse_args(["config.py", *flags]))
    assert [name for name in (FORCE_SAFE, FORCE_UNSAFE) if os.environ.get(name) == "1"] == [switch]


def test_what_needs_a_gpu_is_replaced():
    amp = dict(type="mmengine.AmpOptimWrapper", dtype="bfloat16", accumulative_counts=2)
    model = dict(neck=[dict(norm_cfg=dict(type="SyncBN", requires_grad=True))])
    cfg = Config(dict(optim_wrapper=dict(constructor="Several", generator=amp), model=model, sync_bn="torch"))
    assert len(adapt_to_cpu(cfg)) == 1
    assert cfg.optim_wrapper.generator == dict(type="OptimWrapper", accumulative_counts=2)
    assert cfg.model.neck[0].norm_cfg.type == "SyncBN", "mmengine's Runner replaces it where there are no ranks"
    cfg.update(launcher="pytorch", model_wrapper_cfg=dict(bucket_cap_mb=1))
    assert len(adapt_to_cpu(cfg)) == 1 and adapt_to_cpu(cfg) == []
    assert cfg.model.neck[0].norm_cfg == dict(type="BN", requires_grad=True) and "sync_bn" not in cfg
    wrapper = dict(bucket_cap_mb=1, broadcast_buffers=False, find_unused_parameters=False, device_ids=None)
    assert cfg.model_wrapper_cfg == wrapper


def detection_config(**model):
    pipeline = [dict(type="LoadImageFromFile"), dict(type="PackDetInputs", meta_keys=("img_id",))]
    dataset = dict(type="RepeatDataset", dataset=dict(type="CocoDataset", pipeline=pipeline))
    return Config(
        dict(
            default_scope="mmdet",
            model=dict(type="FasterRCNN", **model),
            test_dataloader=dict(dataset=dataset),
            default_hooks=dict(visualization=dict(type="DetVisualizationHook")),
        )
    )


def test_default_augmentation_of_a_detector():
    cfg = detection_config()
    assert len(use_test_time_augmentation(cfg)) == 2
    assert (cfg.model.type.rpartition(".")[2], cfg.model.module.type) == ("DetTTAModel", "FasterRCNN")
    loading, views = cfg.test_dataloader.dataset.dataset.pipeline
    assert loading.type == "LoadImageFromFile"
    flips, (packing,) = views.transforms
    assert sorted(flip.prob for flip in flips) == [0.0, 1.0]
    assert {"flip", "flip_direction", "img_id"} <= set(packing.meta_keys)
    with pytest.raises(UsageError, match="without --tta"):
        use_test_time_augmentation(detection_config(roi_head=dict(mask_head=dict(type="FCNMaskHead"))))


def test_pictures_use_the_hook_of_the_host(toy_config):
    cfg = detection_config()
    show_predictions(cfg, "pictures", window=True, wait_time=0.5)
    hook = cfg.default_hooks.visualization
    assert (hook.draw, hook.show, hook.wait_time, hook.test_out_dir) == (True, True, 0.5, "pictures")
    classifier = Config.fromfile(toy_config, import_custom_modules=False)
    show_predictions(classifier, "pictures")
    hook = classifier.default_hooks.visualization
    assert (hook.enable, hook.out_dir, "show" in hook) == (True, "pictures", False)
    use_test_time_augmentation(classifier)
    with pytest.raises(UsageError, match="--tta or --show-dir"):
        show_predictions(classifier, "pictures")
    with pytest.raises(UsageError, match=r"out\.json"):
        predictions_writer(classifier, "out.json")
    del cfg.default_hooks["visualization"]
    with pytest.raises(UsageError, match="visualization hook"):
        show_predictions(cfg, "pictures")


@pytest.mark.parametrize(
    ("model_type", "scope", "host"),
    [("MaskRCNN", "mmdet", "mmdet"), ("mmpretrain.ImageClassifier", "mmdet", "mmpretrain"), ("X", "mmseg", None)],
)
def test_host_of_a_model(model_type, scope, host):
    cfg = Config(dict(default_scope=scope, model=dict(type=model_type)))
    if host is None:
        with pytest.raises(UsageError, match="neither mmdet nor mmpretrain"):
            host_package(cfg)
    else:
        assert host_package(cfg) == host

"""Every tool runs on every kind of model in the README: ours, any model conditioned from its config, and stock."""

import json
import pickle
import runpy
import sys

import mmdet.models  # noqa: F401 - fills the registry
import mmpretrain.models  # noqa: F401
import pytest
import torch
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmpretrain.datasets import CustomDataset, PackInputs

from mmspectral.engine.testing import for_inferencer
from tests.helpers import CONFIGS, TOOLS, class_folders, coco_set

CLASSES = ("cat", "dog")
LOADER = "batch_size=1, num_workers=0, persistent_workers=False, sampler=dict(type='DefaultSampler', shuffle=False)"
DETECTION = f"""
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(96, 64), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
dataset = dict(type="CocoDataset", ann_file="annotations.json", data_prefix=dict(img="images"), test_mode=True)
test_dataloader = dict(DELETE{LOADER}, dataset=dict(dataset, metainfo=dict(classes={CLASSES}), pipeline=pipeline))
test_evaluator = dict(DELETEtype="mmspectral.CocoMetric", ann_file="annotations.json")
"""
HEADS = """
    neck=dict(in_channels=CHANNELS, out_channels=16, num_outs=5),
    rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16),
        bbox_head=dict(in_channels=16, fc_out_channels=16, num_classes=2),
        mask_roi_extractor=dict(out_channels=16),
        mask_head=dict(in_channels=16, conv_out_channels=16, num_convs=1, num_classes=2),
    ),
    test_cfg=dict(rpn=dict(nms_pre=50, max_per_img=20), rcnn=dict(max_per_img=5, score_thr=0.0)),
"""
IDENTITY = 'conditioning=dict(type="IdentityCorrection", scale=0.5)'


def detector(channels, text):
    model = text.replace("HEADS", HEADS.replace("CHANNELS", repr(channels)))
    bases = [f"mmdet::_base_/{part}.py" for part in ("models/mask-rcnn_r50_fpn", "default_runtime")]
    return f"_base_ = {bases}\nmodel = dict({model})\ntest_cfg = dict()\n{DETECTION.replace('DELETE', '')}"


def classifier(text):
    return f"""
_base_ = "mmpretrain::_base_/default_runtime.py"
model = dict({text})
data_preprocessor = dict(num_classes=2, mean=[127.0] * 3, std=[127.0] * 3, to_rgb=True)
pipeline = [dict(type="LoadImageFromFile"), dict(type="Resize", scale=(32, 32)), dict(type="PackInputs")]
dataset = dict(type="CustomDataset", data_prefix="folders", pipeline=pipeline)
test_dataloader = dict({LOADER}, dataset=dataset)
test_evaluator = dict(type="Accuracy", topk=(1,))
test_cfg = dict()
"""


SWIN = "arch=dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2]), window_size=4, out_indices=(0, 1)"
VIT = "arch=dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=32), img_size=32, patch_size=16"
HEAD = 'head=dict(type="VisionTransformerClsHead", num_classes=2, in_channels=16)'
STAGES = "embed_dims=16, depths=(1, 1), num_heads=(1, 2), strides=(4, 2), window_size=4, out_indices=(0, 1)"
STOCK_SWIN = f'backbone=dict(_delete_=True, type="SwinTransformer", {STAGES}), HEADS'
STOCK_VIT = f'backbone=dict(type="VisionTransformer", {VIT}), {HEAD}'
DARK = 'kernel=dict(type="dark", num_features=8)'
CONDITIONED = f'type="mmspectral.ConditionedModel", {IDENTITY}'
KINDS = {
    "spectral detector": detector(
        [16, 32], f'backbone=dict(_delete_=True, type="mmspectral.SpectralSwin", {SWIN}, {IDENTITY}), HEADS'
    ),
    "DARK detector": detector(
        [16, 32], f'backbone=dict(_delete_=True, type="mmspectral.DarkSwin", {SWIN}, {DARK}), HEADS'
    ),
    "stock detector": detector([16, 32], STOCK_SWIN),
    "conditioned detector": detector([16, 32], f'{CONDITIONED}, model_type="MaskRCNN", {STOCK_SWIN}'),
    "conditioned Mask2Former": f"""
_base_ = {str(CONFIGS / "any_model" / "mask2former_r50_spectral-decoder_8xb2-lsj-50e_coco.py")!r}
model = dict(
    backbone=dict(depth=18, base_channels=8, init_cfg=None),
    panoptic_head=dict(
        in_channels=[8, 16, 32, 64], num_queries=10, num_things_classes=2, num_stuff_classes=0,
        transformer_decoder=dict(num_layers=2), pixel_decoder=dict(encoder=dict(num_layers=1)),
        loss_cls=dict(class_weight=[1.0] * 2 + [0.1]),
    ),
    panoptic_fusion_head=dict(num_things_classes=2, num_stuff_classes=0),
    data_preprocessor=dict(batch_augments=None),
    test_cfg=dict(max_per_image=5),
)
train_dataloader = train_cfg = optim_wrapper = param_scheduler = val_dataloader = val_cfg = val_evaluator = None
{DETECTION.replace("DELETE", "_delete_=True, ")}
""",
    "spectral classifier": classifier(
        f'type="ImageClassifier", backbone=dict(type="mmspectral.SpectralViT", {VIT}, {IDENTITY}), {HEAD}'
    ),
    "DARK classifier": classifier(
        f'type="ImageClassifier", backbone=dict(type="mmspectral.DarkViT", {VIT}, {DARK}), {HEAD}'
    ),
    "stock classifier": classifier(f'type="ImageClassifier", {STOCK_VIT}'),
    "conditioned classifier": classifier(f'{CONDITIONED}, model_type="ImageClassifier", {STOCK_VIT}'),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    coco_set(folder, CLASSES)
    class_folders(folder / "folders", CLASSES)
    return folder


SLOW = ("DARK detector", "stock detector", "spectral classifier", "stock classifier")


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def model(request, folder):
    """Name of the files of a model with random weights: a config and a checkpoint."""
    name = request.param.replace(" ", "_")
    (folder / f"{name}.py").write_text(KINDS[request.param])
    cfg = Config.fromfile(folder / f"{name}.py")
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        built = MODELS.build(cfg.model)
    built.init_weights()
    meta = dict(dataset_meta=dict(classes=CLASSES))
    torch.save(dict(state_dict=built.state_dict(), meta=meta), folder / f"{name}.pth")
    return name


@pytest.fixture
def run(model, folder, tmp_path, monkeypatch, capsys, loaders):
    """Return a function that runs a tool on the model in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.delenv("LOCAL_RANK")

    def run(tool, *arguments, config=f"{model}.py"):
        monkeypatch.setattr(sys, "argv", [tool, config, *map(str, arguments)])
        runpy.run_path(str(TOOLS / tool), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_predict(model, run, tmp_path):
    images = "images" if "classifier" not in model else "folders/cat"
    run("predict.py", f"{model}.pth", images, "-o", tmp_path, "--device", "cpu", "--score-thr", "0")
    assert json.loads((tmp_path / "results.json").read_text())
    assert len(list((tmp_path / "vis").iterdir())) == 2


def test_test(model, run, tmp_path):
    run("test.py", f"{model}.pth", "--work-dir", tmp_path, "--out", tmp_path / "out.pkl", "--show-dir", "shown")
    assert len(pickle.loads((tmp_path / "out.pkl").read_bytes())) in (2, 4)


def test_test_time_augmentation(model, run, tmp_path, capsys):
    boxes = ["--cfg-options", "model.roi_head.mask_head=None", "test_evaluator.metric=bbox"]
    options = ["--tta", *(boxes if model.endswith("detector") else [])]
    if model.endswith("Mask2Former"):
        with pytest.raises(SystemExit, match="2"):
            run("test.py", f"{model}.pth", "--work-dir", tmp_path, *options)
        assert "cannot merge the masks" in capsys.readouterr().err
    else:
        run("test.py", f"{model}.pth", "--work-dir", tmp_path, *options)


@pytest.mark.parametrize("model", ["spectral detector", "spectral classifier"], indirect=True)
def test_a_set_of_several_sets(model, run, folder, tmp_path):
    (folder / "several.py").write_text(
        f"""
_base_ = "{model}.py"
one = {{{{_base_.test_dataloader.dataset}}}}
test_dataloader = dict(dataset=dict(_delete_=True, type="ConcatDataset", datasets=[one, one]))
"""
    )
    images, weights = ("folders/cat" if model.endswith("classifier") else "images"), f"{model}.pth"
    run("predict.py", weights, images, "-o", tmp_path, "--device", "cpu", config="several.py")
    assert json.loads((tmp_path / "results.json").read_text())
    boxes = ["model.roi_head.mask_head=None", "test_evaluator.metric=bbox"] if model.endswith("detector") else []
    options = ["--tta", *(["--cfg-options", *boxes] if boxes else [])]
    run("test.py", weights, "--work-dir", tmp_path, *options, config="several.py")


@pytest.mark.slow
def test_export(model, run, tmp_path):
    file = tmp_path / "backbone.pt2"
    run(
        "export.py",
        f"{model}.pth",
        "--format",
        "exported-program",
        "--part",
        "backbone",
        "--out",
        file,
        "--size",
        64,
        64,
    )
    assert file.is_file()


def test_flops_and_data(model, run):
    assert "| backbone |" in run("analysis_tools/get_flops.py", "--shape", "64")
    run("misc/check_dataset.py")


def test_names_that_inferencers_know_stand_in_the_place_of_classes():
    """As pure Python configs have them."""
    pipeline = [dict(type=step) for step in (LoadImageFromFile, PackInputs, "mmdet.Resize")]
    cfg = Config(dict(test_dataloader=dict(dataset=dict(dataset=dict(type=CustomDataset, pipeline=pipeline)))))
    dataset = for_inferencer(cfg).test_dataloader.dataset
    assert dataset.type == "mmpretrain.CustomDataset"
    assert [step.type for step in dataset.pipeline] == ["LoadImageFromFile", "mmpretrain.PackInputs", "mmdet.Resize"]
    loader = dict(type="mmspectral.LoadImageFromFile")
    cfg.test_dataloader.dataset = dict(datasets=[dict(type="CocoDataset", pipeline=[loader])])
    assert for_inferencer(cfg).test_dataloader.dataset.pipeline[0].type == "LoadImageFromFile"

"""mmdet's and mmpretrain's own scripts and inferencers, with our configs and checkpoints."""

import json
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DefaultScope
from pycocotools import mask
from torch.testing import assert_close

from mmspectral.apis import predict
from mmspectral.compat.__main__ import FILE_NAME, LINE
from tests.helpers import CONFIGS, class_folders

MMDET_TOOLS = Path(find_spec("mmdet").origin).parent / ".mim" / "tools"
MMPRETRAIN_TOOLS = Path(find_spec("mmpretrain").origin).parent / ".mim" / "tools"
CLASSES = ["bright", "dark"]

# The pipelines and the backbone are those of the shipped config.
CLASSIFIER = f"""
_base_ = {str(CONFIGS / "deit" / "spectral-deit-tiny_4xb256_in1k.py")!r}
model = dict(head=dict(num_classes=2), train_cfg=None)
data_preprocessor = dict(num_classes=2)
loader = dict(
    batch_size=2,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler"),
    dataset=dict(data_root="DATA", split="", metainfo=dict(classes={CLASSES})),
)
train_dataloader = loader
val_dataloader = loader
test_dataloader = loader
val_evaluator = dict(topk=(1,))
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
optim_wrapper = dict(type="OptimWrapper")  # the base's mixed precision needs a GPU
param_scheduler = []
default_hooks = dict(checkpoint=dict(save_optimizer=False))
"""

# Each process starts without mmspectral: the host's registries find it by the prefix in the config.
START = """
import sys
from mmengine.config import Config
from mmengine.registry import DefaultScope, init_default_scope
SCOPES = (None, "mmdet", "mmpretrain", "mmspectral")

def enter(scope):
    DefaultScope._instance_dict.clear()
    if scope:
        init_default_scope(scope)

def scope():
    current = DefaultScope.get_current_instance()
    return current and current.scope_name

assert "mmspectral" not in sys.modules
config, checkpoint, image, out = sys.argv[1:]
"""

DETECT = """
import json
from mmdet.apis import DetInferencer, inference_detector, init_detector

def detect(**settings):
    return DetInferencer(**settings, device="cpu", show_progress=False)

# The checkpoint holds the config of its training.
inferencer = detect(weights=checkpoint)
inferencer.model.roi_head.test_cfg.update(score_thr=0.0, max_per_img=5)
found = dict(
    checkpoint=inferencer(image)["predictions"][0],
    config=detect(model=Config.fromfile(config), weights=checkpoint)(image)["predictions"][0],
)
for given in SCOPES:
    enter(given)
    found[f"{given} path"] = detect(model=config, weights=checkpoint)(image)["predictions"][0]
    enter(given)
    model = init_detector(config, checkpoint, device="cpu")
    found[f"{given} init_detector"] = inferencer.pred2dict(inference_detector(model, image))
    # mmdet sets its own scope, whatever the model.
    assert scope() == "mmdet", scope()
with open(out, "w") as file:
    json.dump(found, file)
"""

CLASSIFY = """
import pickle
from mmpretrain import FeatureExtractor, ImageClassificationInferencer, get_model

def classify(model):
    return ImageClassificationInferencer(model, pretrained=checkpoint, device="cpu")(image)[0]

prefixed = Config.fromfile(config)
for transform in prefixed.test_dataloader.dataset.pipeline:
    if transform.type in ("ResizeEdge", "PackInputs"):
        transform.type = f"mmpretrain.{transform.type}"
found = dict(labels=dict(config=classify(Config.fromfile(config))), features={})
for given in SCOPES:
    enter(given)
    found["labels"][f"{given} prefixed"] = classify(prefixed)
    model = get_model(config, pretrained=checkpoint)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        found["labels"][f"{given} get_model"] = ImageClassificationInferencer(model)(image)[0]
        found["labels"][f"{given} path"] = classify(config)
        found["features"][given] = FeatureExtractor(config, pretrained=checkpoint)(image, stage="backbone")[0]
    assert scope() == given, (scope(), given)
with open(out, "wb") as file:
    pickle.dump(found, file)
"""


@pytest.fixture(scope="module")
def run_host(run_command, tmp_path_factory):
    """Return a function that runs code with the line that ``compat install`` puts into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    (folder / FILE_NAME).write_text(LINE)

    def run(code, *arguments):
        code = f"import site; site.addsitedir({str(folder)!r})\n{code}"
        return run_command(sys.executable, "-W", "ignore", "-c", code, *arguments)

    return run


@pytest.fixture(scope="module")
def run_script(run_host):
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return lambda *arguments: run_host(code, *arguments)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    file = tmp_path_factory.mktemp("image") / "1.png"
    cv2.imwrite(str(file), np.random.default_rng(0).integers(0, 255, (120, 150, 3), dtype=np.uint8))
    return file


@pytest.fixture(scope="module")
def detector(quickstart_config, tmp_path_factory):
    """The quick start's config with detections of a model that was hardly trained."""
    file = tmp_path_factory.mktemp("detector") / "config.py"
    test_cfg = "dict(rcnn=dict(score_thr=0.0, max_per_img=5))"
    file.write_text(f"_base_ = {str(quickstart_config)!r}\nmodel = dict(test_cfg={test_cfg})\n")
    return file


@pytest.fixture(scope="module")
def classifier(run_script, tmp_path_factory):
    """Folder of a config, its images, and a run of two iterations by mmpretrain's own script."""
    folder = tmp_path_factory.mktemp("classifier")
    class_folders(folder / "data", CLASSES, size=(40, 50))
    (folder / "config.py").write_text(CLASSIFIER.replace("DATA", str(folder / "data")))
    run_script(MMPRETRAIN_TOOLS / "train.py", folder / "config.py", "--work-dir", folder)
    return folder


@pytest.fixture(scope="module")
def direct_classifier(classifier):
    """Return a function from an image to scores and features of the model itself, loaded by torch alone."""
    from mmpretrain.registry import MODELS

    cfg = Config.fromfile(classifier / "config.py")
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        model = MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor)).eval()
        pipeline = Compose(cfg.test_dataloader.dataset.pipeline)
    model.load_state_dict(torch.load(classifier / "epoch_1.pth", weights_only=False)["state_dict"], strict=True)

    @torch.no_grad()
    def run(file):
        inputs = model.data_preprocessor(pseudo_collate([pipeline(dict(img_path=str(file)))]))["inputs"]
        return model(inputs, mode="tensor").softmax(1)[0], model.backbone(inputs)[0][0]

    return run


def test_detectors_of_mmdet_under_any_scope(run_host, trained_quickstart, detector, image, tmp_path):
    """Boxes and masks of mmdet's inferencer and functions are those of predict.py."""
    checkpoint = trained_quickstart / "epoch_1.pth"
    run_host(START + DETECT, detector, checkpoint, image, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 10
    records = predict(Config.fromfile(detector), str(checkpoint), [image], tmp_path, "cpu", pictures=False).records
    assert len(records) == 5 and any(mask.area(record["segmentation"]) for record in records)
    boxes = [[x, y, x + width, y + height] for x, y, width, height in (record["bbox"] for record in records)]
    for name, result in found.items():
        assert result["scores"] == pytest.approx([record["score"] for record in records], rel=1e-5), name
        assert_close(torch.tensor(result["bboxes"]), torch.tensor(boxes), msg=name)
        assert result["labels"] == [record["category_id"] - 1 for record in records], name
        assert result["masks"] == [record["segmentation"] for record in records], name


def test_classifiers_of_mmpretrain_under_any_scope(run_host, classifier, direct_classifier, image, tmp_path):
    """mmpretrain#1839: its inferencer looks for transforms without a prefix in the default scope, whatever the model.

    So under a foreign one they carry the prefix, or the scope is set for the time.
    """
    run_host(START + CLASSIFY, classifier / "config.py", classifier / "epoch_1.pth", image, tmp_path / "found.pkl")
    found = pickle.loads((tmp_path / "found.pkl").read_bytes())
    scores, features = direct_classifier(image)
    assert len(found["labels"]) == 13 and len(found["features"]) == 4
    for name, result in found["labels"].items():
        assert_close(torch.from_numpy(result["pred_scores"]), scores, msg=name)
        assert result["pred_class"] == CLASSES[scores.argmax()]
    for name, result in found["features"].items():
        assert_close(result[0], features, msg=name)


@pytest.mark.parametrize("scope", ["mmdet", "mmpretrain"])
def test_predict_needs_and_changes_no_scope(
    scope, classifier, direct_classifier, trained_quickstart, detector, image, tmp_path
):
    with DefaultScope.overwrite_default_scope(scope):
        checkpoint = str(classifier / "epoch_1.pth")
        cfg = Config.fromfile(classifier / "config.py")
        (record,) = predict(cfg, checkpoint, [image], tmp_path, "cpu", pictures=False).records
        assert record["score"] == pytest.approx(direct_classifier(image)[0].max().item(), rel=1e-5)
        cfg, checkpoint = Config.fromfile(detector), str(trained_quickstart / "epoch_1.pth")
        assert len(predict(cfg, checkpoint, [image], tmp_path, "cpu", pictures=False).records) == 5
        assert DefaultScope.get_current_instance().scope_name == scope


def test_mmpretrains_own_test_script(run_script, classifier, direct_classifier, tmp_path):
    run_script(
        *(MMPRETRAIN_TOOLS / "test.py", classifier / "config.py", classifier / "epoch_1.pth"),
        *("--work-dir", tmp_path, "--out", tmp_path / "found.pkl"),
    )
    found = pickle.loads((tmp_path / "found.pkl").read_bytes())
    assert len(found) == 4
    for sample in found:
        assert_close(sample["pred_score"], direct_classifier(sample["img_path"])[0])


def test_mmdets_own_train_script_resumes_exactly(
    run_script, quickstart_config, tiny_options, trained_quickstart, tmp_path
):
    """From a checkpoint of tools/train.py, by a child of the config that has custom hooks of its own."""
    config = tmp_path / "child.py"
    config.write_text(f"_base_ = {str(quickstart_config)!r}\ncustom_hooks = [dict(type='EmptyCacheHook')]\n")
    options = ["--cfg-options", *tiny_options, "train_cfg.max_epochs=2"]
    for folder, flags in dict(straight=[], resumed=["--resume", trained_quickstart / "epoch_1.pth"]).items():
        run_script(MMDET_TOOLS / "train.py", config, "--work-dir", tmp_path / folder, *flags, *options)
    straight, resumed = (
        torch.load(tmp_path / folder / "epoch_2.pth", weights_only=False) for folder in ("straight", "resumed")
    )
    for name, value in straight["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name]), name
    assert not (tmp_path / "resumed" / "epoch_1.pth").exists()

"""Damaged annotation files and configs: the check names what is wrong, and what it accepts mmdet can read."""

import contextlib
import copy
import io

import pycocotools.mask
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mmdet.registry import DATASETS, METRICS
from mmengine.config import Config
from mmengine.registry import DefaultScope
from pycocotools.coco import COCO

from mmspectral.datasets import check_dataset
from tests.test_datasets.conftest import CLASSES

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 5, 40, 0.5, 1.5, -0.0, 1e7, float("nan"), float("inf"), 1e-300, 1e308, 2**63, 10**30, 10**400, True]
)
NAMES = st.sampled_from(["", "no", "cat", "1.png", "../1.png", "/", "\x00", "naïve 猫.png", "\ud800", "a" * 300])
LEAVES = st.none() | NUMBERS | NAMES
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(NAMES | st.just("counts"), inner, max_size=3),
    max_leaves=8,
)
PLAUSIBLE = st.lists(st.floats(-5, 50), min_size=4, max_size=8) | st.lists(
    st.lists(st.integers(-5, 50) | st.floats(-5, 50), max_size=9), max_size=3
)


def places(node, path=()):
    """Every place in nested lists and dicts."""
    yield path
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        yield from places(value, (*path, key))


def damage(content, data, strategy):
    """Replace, remove or repeat something somewhere."""
    content = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(content))))
        if not path:
            continue
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "repeat", "retype"]))
        if action == "retype":
            if isinstance(parent[path[-1]], (int, float)):
                with contextlib.suppress(OverflowError, ValueError):
                    parent[path[-1]] = data.draw(st.sampled_from([float, str, bool]))(parent[path[-1]])
        elif action == "replace":
            parent[path[-1]] = data.draw(strategy)
        elif action == "remove":
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
    return content


def budget(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def accepted_files_can_be_read(content, coco_config):
    cfg = coco_config(content)
    report = check_dataset(cfg)
    assert all(text.strip() for text in report.all_errors)
    str(report)
    if report.all_errors:
        return
    with DefaultScope.overwrite_default_scope("mmdet"), contextlib.redirect_stdout(io.StringIO()):
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
        samples = [dataset[index]["data_samples"].gt_instances for index in range(len(dataset))]
    counts = report.splits[0].counts
    assert counts["images used"] == str(len(dataset))
    assert counts["objects used"] == str(sum(map(len, samples)))


def predictions(coco, classes, image):
    """Return a data sample with the ground truth of an image as detections."""
    ids = coco.getCatIds(catNms=classes)
    found = coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]], catIds=ids))
    boxes = torch.tensor([annotation["bbox"] for annotation in found], dtype=torch.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    instances = dict(
        bboxes=boxes,
        scores=torch.ones(len(found)),
        labels=torch.tensor([ids.index(annotation["category_id"]) for annotation in found], dtype=torch.long),
        masks=[coco.annToRLE(annotation) for annotation in found],
    )
    return dict(img_id=image["id"], ori_shape=(image["height"], image["width"]), pred_instances=instances)


def accepted_files_can_be_evaluated(content, evaluator, coco_config):
    """The ground truth as detections scores 1, and nothing detected is no accident."""
    cfg = coco_config(content, content, evaluator=evaluator)
    report = check_dataset(cfg, ["val"])
    if report.all_errors:
        return
    with DefaultScope.overwrite_default_scope("mmdet"), contextlib.redirect_stdout(io.StringIO()):
        metric = METRICS.build(cfg.val_evaluator)
        metric.dataset_meta = dict(classes=CLASSES)
        coco = COCO(cfg.val_evaluator.ann_file)
        whole = [predictions(coco, CLASSES, image) for image in content["images"]]
        nothing = dict(bboxes=torch.zeros(0, 4), scores=torch.zeros(0), labels=torch.zeros(0), masks=[])
        empty = [dict(sample, pred_instances=nothing) for sample in whole]
        scores = []
        for samples in (whole, empty):
            metric.process({}, samples)
            scores.append(metric.evaluate(len(samples)))
    if any("count in the evaluation" in text for text in report.all_warnings):
        return
    # Nothing matches a mask without a pixel; mmdet's metric says nothing at all where nothing is detected.
    masks = [mask for sample in whole for mask in sample["pred_instances"]["masks"]]
    names = ("bbox", "segm") if all(map(pycocotools.mask.area, masks)) else ("bbox",)
    assert {scores[0].get(f"coco/{name}_mAP", -1.0) for name in names} <= {1.0, -1.0}, scores[0]


def check_annotation_files(examples, coco_content, coco_config):
    def check(data):
        content = damage(coco_content, data, JUNK | PLAUSIBLE)
        accepted_files_can_be_read(content, coco_config)
        kind = data.draw(st.sampled_from(["mmspectral.CocoMetric", "mmdet.CocoMetric"]))
        accepted_files_can_be_evaluated(content, kind, coco_config)

    return given(st.data())(check), examples


def test_annotation_files(coco_content, coco_config):
    check, examples = check_annotation_files(40, coco_content, coco_config)
    budget(examples)(check)()


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_annotation_files(coco_content, coco_config, cache):
    """10,000 files; a run that was interrupted, or failed, goes on where it stopped."""
    for number in range(cache.get("annotation_files", 0), 100):
        check, examples = check_annotation_files(100, coco_content, coco_config)
        seed(number)(settings(budget(examples), derandomize=False)(check))()
        cache.set("annotation_files", number + 1)
    cache.set("annotation_files", 0)


def any_damage_ends_with_a_report(plain, data):
    report = check_dataset(Config(damage(plain, data, JUNK.filter(lambda value: value != "\ud800"))))
    assert str(report)


@budget(300)
@given(data=st.data())
def test_configs_of_detectors(data, coco_content, coco_config):
    any_damage_ends_with_a_report(coco_config(coco_content, coco_content).to_dict(), data)


@budget(150)
@given(data=st.data())
def test_configs_of_classifiers(data, image_folder):
    dataset = dict(type="CustomDataset", data_prefix=dict(img_path=str(image_folder.parent)), pipeline=[])
    dataset.update(ann_file="", metainfo=dict(classes=["ant"]), with_label=True, indices=[0], filter_cfg=dict(a=1))
    model = dict(type="ImageClassifier", head=dict(type="LinearClsHead", num_classes=1))
    repeated = dict(type="RepeatDataset", dataset=dataset)
    loaders = dict(train_dataloader=dict(dataset=dataset), val_dataloader=dict(dataset=repeated))
    any_damage_ends_with_a_report(dict(default_scope="mmpretrain", model=model, **loaders), data)

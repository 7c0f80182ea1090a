"""Damaged annotation files and configs: the check names what is wrong, and what it accepts mmdet can read."""

import contextlib
import copy
import io

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.registry import DefaultScope

from mmspectral.datasets import check_dataset

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 5, 40, 1.5, -0.0, float("nan"), float("inf"), 1e-300, 1e308, 2**63, 10**400, True]
)
NAMES = st.sampled_from(["", "cat", "1.png", "../1.png", "/", "\x00", "naïve 猫.png", "\ud800", "a" * 300])
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
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
        if action == "replace":
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


@pytest.mark.parametrize("examples", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_annotation_files(examples, coco_content, coco_config):
    def check(data):
        accepted_files_can_be_read(damage(coco_content, data, JUNK | PLAUSIBLE), coco_config)

    budget(examples)(given(st.data())(check))()


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

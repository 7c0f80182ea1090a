"""COCO's published numbers, and what is shown where there is nothing to score."""

import importlib.util
import io
import json
import logging
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from mmdet.evaluation import CocoMetric as MMDetCocoMetric
from mmdet.registry import METRICS
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope

from mmspectral.errors import UsageError
from mmspectral.evaluation import coco_metric
from mmspectral.evaluation.coco_metric import _ITEMS
from mmspectral.registry import METRICS as OUR_METRICS

_SHARED = Path(os.environ.get("MMSPECTRAL_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
_FIXTURE = _SHARED / "coco_eval_val2014_100"


def _build(classes=("a", "b"), **settings):
    """Return the metric for a data set with these classes."""
    with DefaultScope.overwrite_default_scope("mmdet"):
        metric = METRICS.build(dict(type="mmspectral.CocoMetric", **settings))
    metric.dataset_meta = {"classes": classes}
    return metric


@pytest.fixture(params=["as installed", "without faster_coco_eval"])
def implementation(request, monkeypatch):
    """Register the metric as it is here, and as it is where faster_coco_eval is not installed."""
    if request.param == "as installed":
        return
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    monkeypatch.delitem(OUR_METRICS.module_dict, "CocoMetric")
    spec = importlib.util.spec_from_file_location("coco_metric_without_faster", coco_metric.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.CocoMetric.__bases__ == (MMDetCocoMetric,)


@pytest.fixture
def log():
    """What mmengine's current logger writes during the test."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def _sample(img_id, size, boxes, scores, labels, masks=None):
    instances = {
        "bboxes": torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4),
        "scores": torch.tensor(scores, dtype=torch.float64),
        "labels": torch.tensor(labels, dtype=torch.long),
    }
    if masks is not None:
        instances["masks"] = masks
    return {"img_id": img_id, "ori_shape": size, "pred_instances": instances}


def _published_detections(ann_file, results_file):
    """Turn COCO's official fake results into the data samples that a detector would give."""
    truth, results = json.loads(ann_file.read_text()), json.loads(results_file.read_text())
    labels = {category["id"]: label for label, category in enumerate(truth["categories"])}
    by_image = defaultdict(list)
    for result in results:
        by_image[result["image_id"]].append(result)
    samples = []
    for image in truth["images"]:
        found = by_image[image["id"]]
        # A mask result has no box, and its area is that of the mask.
        boxes = [result.get("bbox", [0.0, 0.0, 1.0, 1.0]) for result in found]
        samples.append(
            _sample(
                image["id"],
                (image["height"], image["width"]),
                [[x, y, x + w, y + h] for x, y, w, h in boxes],
                [result["score"] for result in found],
                [labels[result["category_id"]] for result in found],
                [result["segmentation"] for result in found] if "segmentation" in results[0] else None,
            )
        )
    return samples, tuple(category["name"] for category in truth["categories"])


@pytest.mark.parametrize("metric", ["bbox", "segm"])
def test_published_numbers(metric, implementation):
    if not _FIXTURE.is_dir():
        pytest.skip(f"COCO's evaluation fixture is not at {_FIXTURE}; set MMSPECTRAL_SHARED_DATA")
    ann_file = _FIXTURE / "instances_val2014_100.json"
    name = {"bbox": "fakebbox100", "segm": "fakesegm100"}[metric]
    samples, classes = _published_detections(ann_file, _FIXTURE / f"instances_val2014_{name}_results.json")
    evaluator = _build(classes, ann_file=str(ann_file), metric=metric)
    for sample in samples:
        evaluator.process({}, [sample])
    scores = evaluator.evaluate(len(samples))

    published = json.loads((_FIXTURE / "expected_stats.json").read_text())["pycocotools_2.0.11"][metric]
    assert list(scores) == [f"coco/{metric}_{item}" for item in _ITEMS]
    assert list(scores.values()) == [round(value, 3) for value in published]


@pytest.fixture
def large_only(tmp_path):
    """Annotations of two large squares of class "a" in two images; nobody has class "b"."""
    ann_file = tmp_path / "large.json"
    square = dict(bbox=[10, 10, 120, 120], area=120 * 120, segmentation=[[10, 10, 130, 10, 130, 130, 10, 130]])
    annotations = [dict(square, id=i, image_id=i, category_id=1, iscrowd=0) for i in (1, 2)]
    images = [{"id": i, "file_name": f"{i}.png", "width": 200, "height": 200} for i in (1, 2)]
    categories = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    ann_file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return str(ann_file)


_SQUARE = [10.0, 10.0, 130.0, 130.0]


def _evaluate(evaluator, boxes=(_SQUARE,), **truth):
    """Score detections of class "a" by falling score, the mask of each the square, in each of the two images."""
    masks = torch.zeros(len(boxes), 200, 200, dtype=torch.bool)
    masks[:, 10:130, 10:130] = True
    scores = [0.9 - i / 10 for i in range(len(boxes))]
    for image_id in (1, 2):
        sample = _sample(image_id, (200, 200), boxes, scores, [0] * len(boxes), masks)
        evaluator.process({}, [sample | truth])
    return evaluator.evaluate(2)


def _rows(text, metric):
    """Return names to shown values of the last table of a metric."""
    lines = text.splitlines()
    header = max(i for i, line in enumerate(lines) if line.startswith(f"| {metric}"))
    names, values = ([cell.strip() for cell in lines[i].strip("|").split("|")][1:] for i in (header, header + 2))
    return dict(zip(names, values, strict=True))


def test_absent_area_ranges_are_shown_as_not_available(large_only, log):
    scores = _evaluate(_build(ann_file=large_only))
    for metric in ("bbox", "segm"):
        assert _rows(log.getvalue(), metric) == {
            **dict.fromkeys(("AP", "AP50", "AP75", "APl", "AR1", "AR10", "AR100", "ARl"), "1.000"),
            **dict.fromkeys(("APs", "APm", "ARs", "ARm"), "n/a"),
        }
        assert scores[f"coco/{metric}_mAP_s"] == -1
    assert log.getvalue().count("n/a: no ground truth in that area range.") == 2


@pytest.mark.parametrize("ground_truth", ["ann_file", "data_samples"])
def test_no_detection_scores_zero(large_only, log, ground_truth, implementation):
    evaluator = _build(ann_file=large_only if ground_truth == "ann_file" else None, metric="bbox")
    truth = {"bboxes": torch.tensor([_SQUARE]), "labels": torch.tensor([0])}
    scores = _evaluate(evaluator, (), gt_instances=truth, instances=[{"bbox": _SQUARE, "bbox_label": 0}])
    assert scores == {f"coco/bbox_{item}": -1 if "_s" in item or "_m" in item else 0 for item in _ITEMS}
    assert _rows(log.getvalue(), "bbox")["AP"] == "0.000"


def test_ground_truth_comes_from_the_dataset(large_only, log):
    evaluator = _build()
    evaluator.dataset_meta = dict(classes=("a", "b"), ann_file=large_only)
    assert _evaluate(evaluator)["coco/segm_mAP"] == 1
    assert "no ann_file" not in log.getvalue()


def test_rebuilt_ground_truth_is_warned_about(large_only, log):
    with pytest.raises(AssertionError, match="ground truth is required"):
        _evaluate(_build(metric="bbox"))
    assert "Set val_evaluator.ann_file" in log.getvalue()


def test_recall_counts_detections_as_named(large_only):
    """The first of two detections in an image is wrong, so that only more than one find the object."""
    boxes = ([140.0, 140.0, 190.0, 190.0], _SQUARE)
    scores = _evaluate(_build(ann_file=large_only, metric="bbox"), boxes)
    assert (scores["coco/bbox_AR@1"], scores["coco/bbox_AR@10"], scores["coco/bbox_AR@100"]) == (0, 1, 1)


def test_mmdets_own_options(large_only, tmp_path, log):
    prefix = tmp_path / "out" / "run"
    scores = _evaluate(_build(ann_file=large_only, classwise=True, outfile_prefix=str(prefix)))
    assert scores.pop("coco/b_precision") != scores.pop("coco/a_precision") == 1
    assert len(scores) == 24 and set(scores.values()) == {1, -1}
    assert len(json.loads(Path(f"{prefix}.segm.json").read_text())) == 2
    evaluator = _build(ann_file=large_only, format_only=True, outfile_prefix=str(prefix))
    assert _evaluate(evaluator, [_SQUARE] * 3) == {}
    assert len(json.loads(Path(f"{prefix}.bbox.json").read_text())) == 6


def _change(ann_file, index, **values):
    """Replace values of an annotation; ``...`` takes the key away."""
    content = json.loads(Path(ann_file).read_text())
    changed = content["annotations"][index] | values
    content["annotations"][index] = {key: value for key, value in changed.items() if value is not ...}
    Path(ann_file).write_text(json.dumps(content))
    return ann_file


@pytest.mark.parametrize("values", [dict(id=0), dict(id=-1), dict(iscrowd=...)])
def test_legal_annotations_are_read_as_they_are_meant(large_only, values, implementation):
    """COCO's evaluator takes the id 0 for no match."""
    scores = _evaluate(_build(ann_file=_change(large_only, 0, **values)))
    assert scores["coco/bbox_mAP"] == scores["coco/segm_mAP"] == scores["coco/bbox_AR@100"] == 1
    assert _evaluate(_build(ann_file=large_only, metric="bbox"), ())["coco/bbox_mAP"] == 0


@pytest.mark.parametrize(
    "values",
    [dict(segmentation=[]), dict(segmentation=...), dict(segmentation=[[1, 2, 3, 4]]), dict(iscrowd=0.5), dict(id=1.0)],
)
def test_annotations_that_would_be_misread_are_refused_before_the_first_batch(large_only, values):
    with pytest.raises(UsageError, match="cannot be evaluated.*such as"):
        _build(ann_file=_change(large_only, 0, **values))


def test_a_dataset_that_uses_a_part_of_the_file_is_not_punished_for_the_rest(large_only):
    evaluator = _build(ann_file=large_only, metric="bbox")
    evaluator.process({}, [_sample(1, (200, 200), [[10.0, 10.0, 130.0, 130.0]], [0.9], [0])])
    assert evaluator.evaluate(1)["coco/bbox_mAP"] == 1


@pytest.mark.parametrize("metric", ["proposal", []])
def test_wrong_settings_are_named(metric):
    with pytest.raises(ValueError, match="metric"):
        _build(metric=metric)

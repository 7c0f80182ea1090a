"""The datasets of a config, checked one by one, against each other and against the heads of the model."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import DefaultScope

from mmspectral.arguments import type_name
from mmspectral.datasets.check.classification import check_folders, check_list
from mmspectral.datasets.check.coco import CocoUse, are_numbers, check_coco
from mmspectral.datasets.check.report import DatasetReport, SplitReport, check_overlap
from mmspectral.errors import UsageError
from mmspectral.registry import DATASETS

SPLITS = ("train", "val", "test")
# Datasets whose files are checked, and under which key they have the folder of their images.
_IMAGES = {"mmdet.CocoDataset": "img", "mmpretrain.CustomDataset": "img_path"}
# Parts whose num_classes are not those of the dataset: proposals are one class, stuff maps and teachers have their own.
_OTHER_CLASSES = {"backbone", "neck", "rpn_head", "semantic_head", "teacher", "teacher_config", "train_cfg", "test_cfg"}
_READING = ("load_data_list", "parse_data_info")
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def check_dataset(cfg: Config, splits: Sequence[str] = SPLITS) -> DatasetReport:
    """Check everything about a config's data that can be seen without reading an image.

    mmdet's ``CocoDataset``, mmpretrain's ``CustomDataset`` and ``ImageNet`` and their subclasses are checked in full,
    if they lie on this machine. Of others only the classes are compared with the heads.

    Args:
        cfg: Config with ``model`` and dataloaders.
        splits: Which dataloaders are looked at, out of ``"train"``, ``"val"``, ``"test"``.
    """
    report = DatasetReport([])
    seen: list[Mapping] = []
    for split in splits:
        loader = cfg.get(f"{split}_dataloader")
        settings = list(_innermost(loader.get("dataset"))) if isinstance(loader, Mapping) else []
        for index, dataset in enumerate(settings):
            if split == "test" and dataset in seen:  # most configs test on their validation set
                continue
            seen.append(dataset)
            name = split if len(settings) == 1 else f"{split} {index + 1}"
            report.splits.append(_check_split(name, dataset, cfg))
    _compare(report, cfg)
    return report


def check_before_training(cfg: Config) -> None:
    """Check the training and validation data, print what is worth knowing and refuse what cannot work.

    Of several processes only the first does so; the launcher ends the others when it fails. ``check_dataset=False`` in
    the config turns this off.

    Raises:
        UsageError: The data cannot be trained with, or not with this model.
    """
    launched = cfg.get("launcher", "none") != "none"
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") if launched else "0"
    if not cfg.get("check_dataset", True) or rank != "0":
        return
    report = check_dataset(cfg, SPLITS[:2])
    print(report.text(with_errors=False), flush=True)
    if report.all_errors:
        listed = "\n".join(f"- {text}" for text in report.all_errors)
        raise UsageError(f"The data cannot be used with this config (check_dataset=False skips this check):\n{listed}")


def _innermost(dataset: Any) -> Iterator[Mapping]:
    """Yield the settings of datasets below wrappers such as ``RepeatDataset`` and ``ConcatDataset``."""
    if isinstance(dataset, (list, tuple)):
        for part in dataset:
            yield from _innermost(part)
    elif isinstance(dataset, Mapping):
        inner = dataset.get("datasets", dataset.get("dataset"))
        if isinstance(inner, (Mapping, list, tuple)):
            yield from _innermost(inner)
        else:
            yield dataset


def _check_split(name: str, settings: Mapping, cfg: Config) -> SplitReport:
    report = SplitReport(name)
    try:
        # Types are looked up in the config's scope; the annotations are not read and images not transformed.
        with DefaultScope.overwrite_default_scope(cfg.get("default_scope")):
            dataset = DATASETS.build(ConfigDict(settings, lazy_init=True, pipeline=[]))
    except Exception as error:  # the code of any dataset, which the Runner will run again and report on in full
        report.warnings.append(f"It is not checked, as it cannot be built with lazy_init=True: {error}")
        return report
    classes = getattr(dataset, "metainfo", {}).get("classes")
    report.errors += _wrong_classes(classes)
    if report.errors:
        return report
    report.classes = None if classes is None else tuple(classes)
    report.open_vocabulary = bool(getattr(dataset, "return_classes", False))
    kind = next((kind for kind in _IMAGES if _reads_as(dataset, kind)), None)
    if (getattr(dataset, "backend_args", None) or {}).get("backend", "local") != "local":
        report.warnings.append("Only its classes are checked, as its files do not lie on this machine.")
    elif kind and (wrong := _wrong_settings(dataset, _IMAGES[kind])):
        report.errors += wrong
    elif kind == "mmdet.CocoDataset" and report.classes is not None:
        report.source = dataset.ann_file
        evaluators = _coco_evaluators(cfg.get(f"{name.split()[0]}_evaluator"))
        use = _coco_use(dataset, settings, evaluators)
        used = check_coco(report, dataset.ann_file, dataset.data_prefix["img"], use)
        _check_truth(report, dataset.ann_file, used, use, evaluators)
    elif kind == "mmpretrain.CustomDataset":
        report.source = dataset.ann_file or dataset.img_prefix
        if dataset.ann_file:
            check_list(report, dataset.ann_file, dataset.img_prefix, dataset.with_label)
        elif dataset.with_label:
            check_folders(report, dataset.img_prefix, dataset.is_valid_file)
    elif report.classes is not None:
        report.counts["classes"] = str(len(report.classes))
        if "mmspectral.ShapesDataset" not in map(_name, type(dataset).__mro__):  # which is checked by its hash
            report.warnings.append(f"Only its classes are checked, as {type(dataset).__name__} is of no known form.")
    return report


def _reads_as(dataset: Any, kind: str) -> bool:
    """Return whether a dataset reads its files by the code of ``kind``, which subclasses may replace."""
    cls = next((cls for cls in type(dataset).__mro__ if _name(cls) == kind), None)
    return cls is not None and all(getattr(type(dataset), m, None) is getattr(cls, m, None) for m in _READING)


def _name(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


def _coco_evaluators(settings: Any) -> list[Mapping]:
    """Return the settings of COCO's evaluators that score something."""
    parts = settings if isinstance(settings, (list, tuple)) else [settings]
    kinds = ("CocoMetric", "FasterCocoMetric")
    return [part for part in parts if type_name(part).rpartition(".")[2] in kinds and not part.get("format_only")]


def _check_truth(
    report: SplitReport, ann_file: str, used: Sequence[Mapping], use: CocoUse, evaluators: Sequence[Mapping]
) -> None:
    """Check annotation files of evaluators that are not the dataset's."""
    for path in {part.get("ann_file") for part in evaluators}:
        if not _is_path(path) or os.path.realpath(path) == os.path.realpath(ann_file):
            continue
        truth = SplitReport(report.name)
        known = {image["id"] for image in check_coco(truth, path, None, dataclasses.replace(use, indices=None))}
        report.errors += [f"the evaluator's {path}: {text}" for text in truth.errors]
        if not truth.errors and (unknown := [image["id"] for image in used if image["id"] not in known]):
            report.errors.append(
                f"{len(unknown):,} images are not in the evaluator's {path} (such as {unknown[0]}): set its ann_file "
                "to the annotation file of the dataset."
            )


def _metrics(evaluator: Mapping) -> list[str]:
    metric = evaluator.get("metric", ("bbox", "segm") if "mmspectral" in type_name(evaluator) else "bbox")
    return [metric] if isinstance(metric, str) else [name for name in metric if isinstance(name, str)]


def _coco_use(dataset: Any, settings: Mapping, evaluators: Sequence[Mapping]) -> CocoUse:
    filters = dataset.filter_cfg or {}
    steps = list(_transforms(settings.get("pipeline")))
    return CocoUse(
        classes=tuple(dataset.metainfo["classes"]),
        own_classes="classes" not in (settings.get("metainfo") or {}),
        training=not dataset.test_mode,
        needs_masks=any(type_name(step).endswith("LoadAnnotations") and step.get("with_mask") for step in steps),
        evaluated=frozenset(name for evaluator in evaluators for name in _metrics(evaluator)),
        by_mmdet=any("mmspectral" not in type_name(evaluator) for evaluator in evaluators),
        loader=next((step for step in steps if type_name(step).endswith("LoadImageFromFile")), {}),
        filter_empty=bool(filters.get("filter_empty_gt", False)),
        min_size=filters.get("min_size", 0),
        indices=dataset._indices,
    )


def _transforms(pipeline: Any) -> Iterator[Mapping]:
    """Yield the settings of all transforms, also below others."""
    if isinstance(pipeline, Mapping):
        yield pipeline
        pipeline = list(pipeline.values())
    if isinstance(pipeline, (list, tuple)):
        for part in pipeline:
            yield from _transforms(part)


def _compare(report: DatasetReport, cfg: Config) -> None:
    known = [split for split in report.splits if split.classes is not None]
    compared: set[tuple[str, ...]] = set()
    for split in known:
        doubtful = split.open_vocabulary or split.wrong_classes or split.classes in compared
        if not doubtful and isinstance(cfg.get("model"), Mapping):
            compared.add(split.classes)
            report.errors += [f"{text} (dataset: {split.name})" for text in check_heads(cfg.model, split.classes)]
    for first, second in combinations(report.splits, 2):
        if first.name.split()[0] == second.name.split()[0]:
            continue
        if None not in (first.classes, second.classes) and first.classes != second.classes:
            report.errors.append(
                f"{first.name} and {second.name} have different classes or another order of them: set the same "
                "metainfo in both dataloaders, since the model's outputs have one order."
            )
        if first.name.startswith("train"):
            report.warnings += check_overlap(first, second)


def _wrong_classes(classes: Any) -> list[str]:
    if classes is None or (isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)):
        return []
    if isinstance(classes, str):
        return [f"classes is the string {classes!r}; write metainfo=dict(classes=({classes!r},))."]
    return [_sentence("classes", classes, "a tuple of names")]


def _wrong_settings(dataset: Any, images: str) -> list[str]:
    """Say which settings of a dataset with images in ``data_prefix[images]`` mmdet or mmpretrain cannot read."""
    filters, prefix, indices = dataset.filter_cfg or {}, dataset.data_prefix, dataset._indices
    min_size = filters.get("min_size", 0) if isinstance(filters, Mapping) else 0
    has_images = isinstance(prefix, Mapping) and images in prefix and all(map(_is_path, prefix.values()))
    numbers = indices if isinstance(indices, (list, tuple)) else [0 if indices is None else indices]
    rules = (
        (_is_path(dataset.ann_file), "ann_file", dataset.ann_file, "a path"),
        (has_images, "data_prefix", prefix, f"a dict of paths with the key {images!r}"),
        (isinstance(filters, Mapping), "filter_cfg", filters, "a dict"),
        (are_numbers([min_size]), "min_size", min_size, "a number of pixels"),
        (all(isinstance(n, int) for n in numbers), "indices", indices, "a number of images or their indices"),
    )
    return [_sentence(name, value, wanted) for holds, name, value, wanted in rules if not holds]


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _sentence(name: str, value: Any, wanted: str) -> str:
    return f"{name} is {value!r}; it must be {wanted}."


def head_classes(model: Mapping) -> dict[str, int]:
    """Return the number of classes of each head, by its dotted name in the config.

    Heads are the parts named ``...head``, alone or in a list (Cascade), at any depth (``roi_head.bbox_head``, test-time
    augmentation, semi-supervision); those with things and stuff (MaskFormer, Mask2Former) count both. Besides,
    mmpretrain's ``data_preprocessor`` and losses count classes for mixed labels, and a list of class weights has one
    for each class and one for none.
    """
    return dict(_counts(model, "model"))


def check_heads(model: Mapping, classes: Sequence[str]) -> list[str]:
    """Return one sentence for each head that has not as many classes as the dataset."""
    return [
        f"{name} is for {count} classes, but the dataset has {len(classes)} ({_listed(classes)}). Set it to "
        f"{len(classes)}: the number of classes, not the largest category id, and without the background."
        for name, count in head_classes(model).items()
        if count != len(classes)
    ]


def _counts(node: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, (list, tuple)):
        for index, item in enumerate(node):
            yield from _counts(item, f"{path}[{index}]")
        return
    if not isinstance(node, Mapping):
        return
    part = path.rpartition(".")[2].partition("[")[0]
    # A mask head with one mask for all classes ignores its num_classes.
    if (part.endswith("head") or part == "data_preprocessor") and not node.get("class_agnostic", False):
        yield from _own_counts(node, path)
    for key, value in node.items():
        if key not in _OTHER_CLASSES and isinstance(key, str):
            yield from _counts(value, f"{path}.{key}")


def _own_counts(head: Mapping, path: str) -> Iterator[tuple[str, int]]:
    things, stuff = head.get("num_things_classes"), head.get("num_stuff_classes", 0)
    if _is_count(head.get("num_classes")):
        yield f"{path}.num_classes", head["num_classes"]
    elif _is_count(things) and _is_count(stuff):
        yield f"{path}.num_things_classes + num_stuff_classes", things + stuff
    for name in ("loss_cls", "loss"):
        loss = head.get(name)
        if not isinstance(loss, Mapping):
            continue
        weights = loss.get("class_weight")
        if name == "loss_cls" and isinstance(weights, (list, tuple)) and not loss.get("use_sigmoid", False):
            yield f"{path}.{name}.class_weight (its length less one for the background)", len(weights) - 1
        if _is_count(loss.get("num_classes")):
            yield f"{path}.{name}.num_classes", loss["num_classes"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(classes: Sequence[str]) -> str:
    return ", ".join(map(str, classes[:4])) + (", ..." if len(classes) > 4 else "")

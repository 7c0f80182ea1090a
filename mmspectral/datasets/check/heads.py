"""How many classes the heads of a model predict, as its config says."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Parts whose num_classes are not those of the dataset: proposals are one class, stuff maps and teachers have their own.
_OTHER_CLASSES = {"backbone", "neck", "rpn_head", "semantic_head", "teacher", "teacher_config", "train_cfg", "test_cfg"}


def head_classes(model: Mapping) -> dict[str, int]:
    """Return the number of classes of each head, by its dotted name in the config.

    Heads are the parts named ``...head``, alone or in a list (Cascade), at any
    depth (``roi_head.bbox_head``, test-time augmentation, semi-supervision);
    those with things and stuff (MaskFormer, Mask2Former) count both. Besides,
    mmpretrain's ``data_preprocessor`` and losses count classes for mixed labels,
    and a list of class weights has one for each class and one for none.
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

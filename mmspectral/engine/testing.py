"""What a test run may add to its config: pictures, predictions on disk, test-time augmentation."""

from copy import deepcopy
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults

from mmspectral.arguments import host_package, type_name
from mmspectral.errors import UsageError


def innermost_datasets(cfg: Config) -> list[ConfigDict]:
    """Return the settings of the test datasets below wrappers such as ``RepeatDataset`` and ``ConcatDataset``."""
    found, waiting = [], [cfg.test_dataloader.dataset]
    while waiting:
        dataset = waiting.pop(0)
        inner = dataset.get("datasets", dataset.get("dataset"))
        if inner is None:
            found.append(dataset)
        else:
            waiting += inner if isinstance(inner, (list, tuple)) else [inner]
    return found


def for_inferencer(cfg: Config) -> Config:
    """Return a copy with the first test dataset alone, and with names of types that the hosts' inferencers know."""
    dataset = deepcopy(innermost_datasets(cfg)[0])
    for step in (dataset, *dataset.pipeline):
        package, _, path = type_name(step).partition(".")
        name = path.rpartition(".")[2] or package
        if name == "LoadImageFromFile":  # which an inferencer replaces
            step.type = name
        elif not isinstance(step.type, str):
            step.type = f"{package}.{name}" if package in ("mmdet", "mmpretrain", "mmspectral") else name
    cfg = deepcopy(cfg)
    cfg.test_dataloader.dataset = dataset
    return cfg


def show_predictions(cfg: Config, folder: str | None, window: bool = False, wait_time: float = 2.0) -> None:
    """Draw the predictions of every test image; changes ``cfg`` in place.

    Args:
        cfg: Config of the test.
        folder: Where pictures go, by mmdet below the run's time stamp in the work folder; None writes none.
        window: Show each picture for ``wait_time`` seconds.

    Raises:
        UsageError: The config has no visualization hook, or it is mmpretrain's
            and several views of each image come in.
    """
    hook = cfg.get("default_hooks", {}).get("visualization")
    if hook is None:
        raise UsageError(
            "--show and --show-dir need a visualization hook: add the host's hook to the config's default_hooks, "
            "visualization=dict(type='DetVisualizationHook') or visualization=dict(type='VisualizationHook')."
        )
    detection = host_package(cfg) == "mmdet"
    if not detection and "module" in cfg.model:
        raise UsageError("mmpretrain cannot draw with test-time augmentation; leave out either --tta or --show-dir.")
    hook["draw" if detection else "enable"] = True
    hook["interval"] = 1
    if window:
        hook["show"] = True
        hook["wait_time"] = wait_time
    if folder is not None:
        hook["test_out_dir" if detection else "out_dir"] = folder


def use_test_time_augmentation(cfg: Config) -> list[str]:
    """Average the predictions of several views of each image; changes ``cfg`` in place.

    Uses the config's ``tta_model`` and ``tta_pipeline``, else the host's model
    on the image and its mirror image.

    Returns:
        One sentence if a default was taken.

    Raises:
        UsageError: The model predicts masks, which mmdet cannot merge.
    """
    detection = host_package(cfg) == "mmdet"
    notes = []
    if "tta_model" not in cfg:
        notes.append("The config has no tta_model; the host's default is used.")
        merging = dict(nms=dict(type="nms", iou_threshold=0.5), max_per_img=100)
        cfg.tta_model = (
            dict(type="DetTTAModel", tta_cfg=merging) if detection else dict(type="mmpretrain.AverageClsScoreTTA")
        )
    merges_boxes = type_name(cfg.tta_model).rpartition(".")[2] == "DetTTAModel"
    if merges_boxes:
        cfg.tta_model.type = _merging_type()
    heads = (cfg.model.get("roi_head", {}).get("mask_head"), cfg.model.get("mask_head"), cfg.model.get("panoptic_head"))
    if merges_boxes and any(head is not None for head in heads):
        raise UsageError(
            "mmdet cannot merge the masks of several views. Test without --tta, or the boxes of a roi_head alone with "
            "--cfg-options model.roi_head.mask_head=None test_evaluator.metric=bbox."
        )
    datasets = innermost_datasets(cfg)
    if "tta_pipeline" not in cfg:
        notes.append("The config has no tta_pipeline; the image and its mirror image are used.")
        *pipeline, packing = deepcopy(datasets[0].pipeline)
        if detection:
            shapes = ("ori_shape", "img_shape", "scale_factor", "flip", "flip_direction")
            packing["meta_keys"] = ("img_id", "img_path", *shapes)
        flips = [dict(type="RandomFlip", prob=1.0), dict(type="RandomFlip", prob=0.0)]
        cfg.tta_pipeline = [*pipeline, dict(type="TestTimeAug", transforms=[flips, [packing]])]
    if type_name(cfg.model) != type_name(cfg.tta_model):  # the config that such a test has written down
        cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    for dataset in datasets:
        dataset.pipeline = cfg.tta_pipeline
    return notes


def _merging_type() -> str:
    """Return the name of mmdet's model for several views, which its fork registers with mmengine."""
    import mmdet.models  # noqa: F401 - registers it
    from mmdet.registry import MODELS

    return "mmdet.DetTTAModel" if "DetTTAModel" in MODELS.module_dict else "mmengine.DetTTAModel"


def predictions_writer(cfg: Config, path: str) -> DumpResults:
    """Return the evaluator that writes a test's predictions to a pickle file.

    Raises:
        UsageError: The name of the file does not end in .pkl or .pickle.
    """
    if Path(path).suffix not in (".pkl", ".pickle"):
        raise UsageError(f"--out writes a pickle file, and {path} does not end in .pkl or .pickle.")
    if host_package(cfg) == "mmpretrain":
        return DumpResults(out_file_path=path)
    # Masks as run-length codes; imported here, so that classification does not need mmdet.
    from mmdet.evaluation import DumpDetResults

    return DumpDetResults(out_file_path=path)

"""The quick start by our command lines, by one process and by two; by mmdet's: test_foreign_entry_points."""

import json

import torch

from mmspectral.compat.checkpoints import load_from_local
from tests.helpers import QUICKSTART, ROOT, TINY, TOY, log_lines, tool_output


def metrics_of(work_dir):
    return log_lines(work_dir, "coco/bbox_mAP")[-1]


def test_training_leaves_twelve_numbers_for_box_and_mask_and_a_safe_checkpoint(trained_quickstart):
    metrics = metrics_of(trained_quickstart)
    for kind in ("bbox", "segm"):
        assert len([name for name in metrics if name.startswith(f"coco/{kind}_")]) == 12
    state = load_from_local(str(trained_quickstart / "epoch_1.pth"), "cpu")["state_dict"]
    entry = state._metadata["backbone.xca_layers.0.attn.qkv"]["conditioning"]
    assert (entry["type"], entry["scale"]) == ("IdentityCorrection", 10.0)


def test_testing_gives_the_metrics_of_training(trained_quickstart, tmp_path):
    options = ("--work-dir", tmp_path, "--cfg-options", *TINY)
    tool_output("test.py", QUICKSTART, trained_quickstart / "epoch_1.pth", *options)
    report = json.loads(next(tmp_path.glob("*/*.json")).read_text())
    expected = metrics_of(trained_quickstart)
    for name in ("coco/bbox_mAP", "coco/segm_mAP", "coco/bbox_AR@100"):
        assert report[name] == expected[name]


def test_two_ranks_train_and_end_equal(tmp_path):
    (tmp_path / "probed.py").write_text(
        f"_base_ = {str(QUICKSTART)!r}\n"
        "custom_imports = dict(imports=['toy_classification'])\n"
        "custom_hooks = [dict(type='mmengine.WriteRank')]\n"
    )
    options = ("--launcher", "pytorch", "--work-dir", tmp_path, "--cfg-options", *TINY)
    output = tool_output("train.py", tmp_path / "probed.py", *options, ranks=2, path=[ROOT, TOY])
    assert output.count("coco/bbox_mAP:") == 1 and "destroy_process_group" not in output
    ranks = [torch.load(tmp_path / f"rank{rank}.pth", weights_only=True) for rank in (0, 1)]
    for rank in ranks:
        assert rank["wrapper"] == "MMDistributedDataParallel"
        assert rank["evaluations"] == 1
        assert rank["with_gradient"] == sorted(rank["parameters"])
        assert rank["parameters"].keys() == ranks[0]["parameters"].keys()
        for name, value in rank["parameters"].items():
            assert torch.equal(value, ranks[0]["parameters"][name]), name

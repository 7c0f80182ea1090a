"""The quick-start model through every command line: ours, mmdet's, one process and several."""

import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmspectral.compat.__main__ import FILE_NAME, LINE
from tests.helpers import QUICKSTART, ROOT, TINY, TOOLS, TOY, check_ranks, environment, output_of

MMDET_TOOLS = Path(find_spec("mmdet").origin).parent / ".mim" / "tools"


def metrics_of(work_dir):
    logs = sorted(work_dir.glob("*/vis_data/scalars.json"))
    lines = [json.loads(line) for line in logs[-1].read_text().splitlines()]
    return [line for line in lines if "coco/bbox_mAP" in line][-1]


def test_training_leaves_checkpoint_and_twelve_numbers_for_box_and_mask(trained_quickstart):
    assert (trained_quickstart / "epoch_1.pth").is_file()
    metrics = metrics_of(trained_quickstart)
    for kind in ("bbox", "segm"):
        names = [name for name in metrics if name.startswith(f"coco/{kind}_")]
        assert len(names) == 12, names


def test_checkpoint_is_safe_to_load_and_says_it_is_conditioned(trained_quickstart):
    from mmspectral.compat.checkpoints import load_from_local

    state = load_from_local(str(trained_quickstart / "epoch_1.pth"), "cpu")["state_dict"]
    entry = state._metadata["backbone.xca_layers.0.attn.qkv"]
    assert entry["conditioning"]["type"] == "IdentityCorrection"
    assert entry["conditioning"]["scale"] == 10.0


@pytest.mark.parametrize("tools", ["ours", "mmdet"])
def test_testing_gives_the_metrics_of_training(tools, trained_quickstart, tmp_path):
    """Our tools/test.py, and mmdet's own with the operators that ``python -m mmspectral.compat install`` provides."""
    folder = TOOLS if tools == "ours" else MMDET_TOOLS
    output_of(
        *host_python(tools, folder / "test.py", tmp_path),
        *(QUICKSTART, trained_quickstart / "epoch_1.pth", "--work-dir", tmp_path, "--cfg-options", *TINY),
    )
    report = json.loads(next(tmp_path.glob("*/*.json")).read_text())
    expected = metrics_of(trained_quickstart)
    for name in ("coco/bbox_mAP", "coco/segm_mAP", "coco/bbox_AR@100"):
        assert report[name] == expected[name]


def host_python(tools, script, tmp_path):
    """Run a host's script with the line that ``compat install`` would put into site-packages, and with nothing else."""
    if tools == "ours":
        return [sys.executable, script]
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / FILE_NAME).write_text(LINE)
    code = f"import runpy, site, sys; site.addsitedir({str(folder)!r}); sys.argv = sys.argv[1:]; "
    return [sys.executable, "-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')", script]


@pytest.fixture
def probed_config(tmp_path):
    path = tmp_path / "probed.py"
    path.write_text(
        f"_base_ = {str(QUICKSTART)!r}\n"
        "custom_imports = dict(imports=['toy_classification'])\n"
        "custom_hooks = [dict(type='mmengine.WriteRank')]\n"
    )
    return path


def launch(config, ranks, work_dir):
    return ["bash", TOOLS / "dist_train.sh", config, ranks, "--work-dir", work_dir, "--cfg-options", *TINY]


def test_two_ranks_train_and_end_equal(probed_config, tmp_path):
    """Also, SyncBN in the config becomes BN."""
    output = output_of(*launch(probed_config, 2, tmp_path), path=[ROOT, TOY])
    check_ranks(tmp_path)
    assert output.count("coco/bbox_mAP:") == 1


@pytest.mark.slow
def test_two_machines_train_and_end_equal(probed_config, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    machines = [
        subprocess.Popen(
            list(map(str, launch(probed_config, 1, tmp_path))),
            env=environment([TOY], NNODES=2, PORT=port, NODE_RANK=node),
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    for machine in machines:
        output = machine.communicate(timeout=280)[0]
        assert machine.returncode == 0, output
    check_ranks(tmp_path)

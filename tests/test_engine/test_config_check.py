"""Mistakes in a config are named with their place before anything is built or written."""

import sys

import pytest
from mmengine.config import Config

from mmspectral.arguments import report_usage_errors
from mmspectral.engine import check_config
from mmspectral.errors import UsageError
from tests.helpers import QUICKSTART, TOOLS, run

BACKBONE = "model.backbone"


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({f"{BACKBONE}.conditioning.type": "IdentityCorection"}, ["model.backbone.conditioning", "IdentityCorection"]),
        ({f"{BACKBONE}.conditioning.scale": "10"}, ["model.backbone.conditioning", "scale"]),
        ({f"{BACKBONE}.conditioning.sclae": 10}, ["model.backbone.conditioning", "sclae"]),
        ({f"{BACKBONE}.type": "mmspectral.SpectralXCit"}, ["model.backbone.type", "mean mmspectral.SpectralXCiT?"]),
        ({f"{BACKBONE}.type": "SpectralXCiT"}, ["model.backbone.type", "mean mmspectral.SpectralXCiT?"]),
        ({f"{BACKBONE}.num_stages": 4, f"{BACKBONE}.style": "pytorch"}, ["num_stages, style", "_delete_=True"]),
        ({"model.type": "MaskRCN"}, ["model.type", "MaskRCNN?"]),
        ({"model.roi_head.bbox_head.num_clases": 3}, ["model.roi_head.bbox_head", "mean num_classes?"]),
        ({"train_cfg.max_epoch": 3}, ["train_cfg", "max_epoch", "mean max_epochs?"]),
        ({"optim_wrapper.optimizer.lr": "1e-3x"}, ["optim_wrapper.optimizer", "lr='1e-3x' is a string"]),
        ({"optim_wrapper.optimizer.lrr": 1}, ["optim_wrapper.optimizer", "lrr"]),
        ({"optim_wrapper.optimizer.type": "AdmW"}, ["optim_wrapper.optimizer.type", "AdamW?"]),
    ],
)
def test_mistakes(options, facts):
    cfg = Config.fromfile(QUICKSTART)
    check_config(cfg)
    cfg.merge_from_dict(options)
    with pytest.raises(UsageError) as refused:
        check_config(cfg)
    assert all(fact in str(refused.value) for fact in facts), refused.value
    assert len(str(refused.value).splitlines()) == 1


def test_a_command_ends_in_one_line_and_leaves_no_folder(tmp_path):
    command = [sys.executable, TOOLS / "train.py", QUICKSTART, "--work-dir", tmp_path / "run", "--cfg-options"]
    done = run(*command, "train_cfg.max_epoch=3")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("train.py: error: train_cfg: ")
    assert not (tmp_path / "run").exists()
    done = run(*command, "max_epochs")
    assert done.returncode == 2 and "'max_epochs' is no KEY=VALUE" in done.stderr.splitlines()[-1]


def test_errors_of_the_package_are_one_line_and_accidents_are_not(capsys):
    from mmspectral.layers import build_conditioning

    @report_usage_errors
    def ours():
        try:
            build_conditioning(dict(type="Nothing"))
        except KeyError as error:  # as mmengine's registry does
            raise KeyError("class X in x.py: " + error.args[0]) from error

    with pytest.raises(SystemExit):
        ours()
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown conditioning type 'Nothing'" in line
    with pytest.raises(TypeError):
        report_usage_errors(lambda: build_conditioning())()

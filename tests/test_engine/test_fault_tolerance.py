"""The hooks of configs/_base_/runtime.py, and what a training without them is told."""

import pytest
from mmengine.config import Config

from mmspectral.engine.runner.launch import runtime_notes
from mmspectral.errors import UsageError

CHILD = """
_base_ = {bases}
default_hooks = _base_.exact_resume
"""


@pytest.mark.parametrize("host", ["mmdet", "mmpretrain"])
def test_two_lines_turn_it_on_for_a_config_of_a_host(tmp_path, host):
    path = tmp_path / "child.py"
    path.write_text(CHILD.format(bases=[f"{host}::_base_/default_runtime.py", "mmspectral::_base_/runtime.py"]))
    cfg = Config.fromfile(path)
    assert runtime_notes(cfg) == []
    assert (cfg.default_hooks.checkpoint.type, cfg.default_hooks.checkpoint.interval) == (
        "mmspectral.CheckpointHook",
        1,
    )
    assert cfg.default_hooks.logger.type == "LoggerHook"


def test_a_config_without_it_is_told_in_one_line():
    stock = Config(dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook"))))
    (note,) = runtime_notes(stock)
    assert "exact resume, atomic checkpoints" in note and "_base_/runtime.py" in note
    assert runtime_notes(Config()) == [note]
    assert runtime_notes(Config(dict(runner_type="FlexibleRunner"))) == []
    with pytest.raises(UsageError, match="fault_tolerance"):
        runtime_notes(Config(dict(fault_tolerance=False)))

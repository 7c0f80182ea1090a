"""A Mask R-CNN that is killed and resumed ends like one that was not, bit for bit."""

from pathlib import Path

import pytest
import torch

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DATA = Path(__file__).resolve().parents[1] / "data" / "toy_faults"
EPOCHS = 3
# The hooks of each besides the one that kills. An epoch is three iterations: w is drawn anew inside epochs and between.
MODELS = {
    "quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py": [],
    "dark/mask-rcnn_dark-vit-d128-p8_fpn_shapes.py": [dict(type="mmspectral.FeatureRedrawHook", interval=2)],
}


@pytest.fixture(params=MODELS)
def config(request, tmp_path):
    path = tmp_path / "killed.py"
    hooks = [dict(type="mmengine.Doom"), *MODELS[request.param]]
    path.write_text(
        f"_base_ = {str(CONFIGS / request.param)!r}\n"
        "custom_imports = dict(imports=['toy_faults'])\n"
        f"custom_hooks = {hooks}\n"
        "default_hooks = dict(logger=dict(interval=1))\n"
        "randomness = dict(deterministic=True)\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.fault
def test_a_killed_and_resumed_detector_equals_an_uninterrupted_one(config, tiny_options, tmp_path, monkeypatch):
    """Killed in the first save, in the first validation, and in the last epoch."""
    monkeypatch.syspath_prepend(DATA)
    from same_run import assert_same_run
    from toy_faults import run_tool

    options = ["--cfg-options", *tiny_options, f"train_cfg.max_epochs={EPOCHS}", "train_dataloader.num_workers=1"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def train(folder, *arguments, death=(None, 0)):
        folder.mkdir(exist_ok=True)
        arguments = [config, "--work-dir", folder, *arguments, *options]
        return run_tool("train.py", *arguments, log=folder / "output.log", death=death, seconds=900)

    status, log = train(straight)
    assert status == 0, log
    for death, saved in ((("os.rename", 1), []), (("evaluation", 1), [1]), (("step", 5), [1, 2])):
        status, log = train(resumed, "--resume", death=death)
        assert status == -9, log
        assert sorted(path.name for path in resumed.glob("*.pth")) == [f"epoch_{number}.pth" for number in saved]
    status, log = train(resumed, "--resume")
    assert status == 0, log
    weights = torch.load(straight / f"epoch_{EPOCHS}.pth", weights_only=False)["state_dict"]
    assert all(counter == 4 for name, counter in weights.items() if name.endswith("kernel.redraws"))
    assert_same_run(straight, resumed, f"epoch_{EPOCHS}.pth")

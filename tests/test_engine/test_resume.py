"""A run with every hook of ours is saved as what torch reads without code, and goes on where it stopped."""

import json

import torch
from mmengine.optim import OptimWrapper

from mmspectral.compat.checkpoints import SAFE_GLOBALS

SVD = dict(type="SVDCorrection", interval=3)


def hooks():
    return [
        dict(type="mmspectral.CorrectionRefreshHook"),
        dict(type="mmspectral.ConditioningHook", interval=1),
        dict(type="mmspectral.NonFiniteGuardHook"),
        dict(type="EMAHook", momentum=0.3),
        dict(type="CheckpointHook", interval=1),  # the fixture's saves within epochs, where mmengine begins them again
    ]


def test_a_checkpoint_needs_no_code_and_resumes(classifier, make_runner, images, safe_loading):
    def runner(resume_from=None):
        model = classifier(SVD)
        wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), 0.01))
        return make_runner(model, images(2), hooks(), wrapper, epochs=2, resume_from=resume_from)

    whole = runner()
    whole.train()
    assert whole.iter == 4
    path = f"{whole.work_dir}/epoch_1.pth"
    with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
        checkpoint = torch.load(path, weights_only=True)
    assert "backbone.xca_layers.0.attn.qkv.correction" in checkpoint["state_dict"]
    assert checkpoint["message_hub"]["log_scalars"]["train/loss"].current() > 0

    resumed = runner(resume_from=path)
    resumed.train()
    assert resumed.iter == 4
    with open(f"{resumed.log_dir}/vis_data/scalars.json") as log:
        assert [line["step"] for line in map(json.loads, log) if "loss" in line] == [3, 4]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert not torch.equal(resumed.model.head.weight, checkpoint["state_dict"]["head.weight"])

"""Checkpoints that were saved before the redesign load strictly and give the outputs that they were saved with."""

import pytest
import torch

from mmspectral.registry import MODELS
from tests.helpers import DATA

FILES = sorted((DATA / "checkpoints").glob("*.pth"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_outputs_are_those_of_then(path):
    saved = torch.load(path, weights_only=True)
    settings = dict(saved["settings"])
    model = MODELS.build(dict(settings, type=f"mmspectral.{settings['type']}")).eval()
    model.load_state_dict(saved["state_dict"], strict=True)
    with torch.no_grad():
        outputs = model(saved["images"])
    for ours, theirs in zip(outputs, saved["outputs"], strict=True):
        # Bit-equal on the machine that wrote them, with its two threads; others sum in another order.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

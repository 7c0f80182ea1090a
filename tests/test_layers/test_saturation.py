import math

import pytest
import torch

from mmspectral.layers import probe_tokens, saturation

RAMP = torch.linspace(0, 3, 64).bfloat16()[None]


@pytest.mark.parametrize(
    ("logits", "entropy", "relative"),
    [
        (torch.zeros(2, 3, 5, 7), math.log(7), 1),
        (200 * torch.eye(6), 0, 0),
        (torch.full((2, 3, 4, 1), 7.0), 0, 1),  # over a single token
        (torch.zeros(4, 8).masked_fill(torch.arange(8) >= 4, -torch.inf), math.log(4), 2 / 3),  # masked
        (RAMP, saturation(RAMP.float()).entropy, saturation(RAMP.float()).relative_entropy),  # half precision
        (torch.tensor([[0.0, torch.nan]]), math.nan, math.nan),
        (torch.tensor([[0.0, torch.inf]]), math.nan, math.nan),
    ],
)
def test_known_limits(logits, entropy, relative):
    found = saturation(logits)
    assert found.entropy == pytest.approx(entropy, abs=1e-6, nan_ok=True)
    assert found.relative_entropy == pytest.approx(relative, abs=1e-6, nan_ok=True)
    assert saturation(torch.tensor([[0.0, -3.0, -torch.inf]])).largest_logit == 3


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_probe_tokens(correlation):
    state = torch.get_rng_state()
    with torch.device("meta"):  # the same under any default device
        tokens = probe_tokens(50, 4096, correlation)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tokens, probe_tokens(50, 4096, correlation))
    assert tokens.shape == (1, 50, 4096)
    assert torch.allclose(tokens.mean(-1), torch.zeros(1, 50), atol=1e-5)
    gram = tokens[0] @ tokens[0].T / 4096
    off = gram[~torch.eye(50, dtype=torch.bool)]
    assert off.mean().item() == pytest.approx(correlation, abs=0.03)
    with pytest.raises(ValueError, match="correlation"):
        probe_tokens(4, 4, 1.0)

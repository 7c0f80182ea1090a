import math

import pytest
import torch

from mmspectral.layers import attention_layers, probe_tokens, saturation


def test_known_limits():
    uniform = saturation(torch.zeros(2, 3, 5, 7))
    assert uniform.entropy == pytest.approx(math.log(7)) and uniform.relative_entropy == pytest.approx(1)
    one_hot = saturation(200 * torch.eye(6))
    assert one_hot.entropy == pytest.approx(0, abs=1e-6) and one_hot.largest_logit == 200


def test_masked_entries_count_for_nothing():
    logits = torch.zeros(4, 8).masked_fill(torch.arange(8) >= 4, -torch.inf)
    assert saturation(logits).entropy == pytest.approx(math.log(4))


def test_half_precision_is_measured_in_float32():
    logits = torch.linspace(0, 3, 64).bfloat16()[None]
    assert saturation(logits) == saturation(logits.float())


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_probe_tokens(correlation):
    state = torch.get_rng_state()
    tokens = probe_tokens(50, 4096, correlation)
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens.shape == (1, 50, 4096)
    assert torch.allclose(tokens.mean(-1), torch.zeros(1, 50), atol=1e-5)
    gram = tokens[0] @ tokens[0].T / 4096
    off = gram[~torch.eye(50, dtype=torch.bool)]
    assert off.mean().item() == pytest.approx(correlation, abs=0.03)


def test_probe_tokens_are_the_same_under_any_default_device():
    with torch.device("meta"):
        tokens = probe_tokens(5, 8, 0.5)
    assert torch.equal(tokens, probe_tokens(5, 8, 0.5))


def test_correlation_of_one_is_refused():
    with pytest.raises(ValueError, match="correlation"):
        probe_tokens(4, 4, 1.0)


def test_attention_to_a_single_token_is_uniform():
    single = saturation(torch.full((2, 3, 4, 1), 7.0))
    assert single.entropy == single.max_entropy == 0
    assert single.relative_entropy == 1


def test_logits_that_are_not_finite_give_no_entropy():
    assert math.isnan(saturation(torch.tensor([[0.0, torch.nan]])).entropy)
    assert math.isnan(saturation(torch.tensor([[0.0, torch.inf]])).entropy)
    assert saturation(torch.tensor([[0.0, -torch.inf]])).largest_logit == 0


def test_layers_are_found_by_their_method():
    class Attention(torch.nn.Module):
        def attention_logits(self, x):
            return x @ x.mT

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(Attention()))
    assert attention_layers(model) == {"1.0": model[1][0]}

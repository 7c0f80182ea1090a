"""How close attention is to one-hot: entropy and logits on probe tokens.

With layer-normalised tokens and C = lambda * I the logit of a token with itself
is about lambda^2 sqrt(d), so dot-product attention saturates for large lambda.
Any attention module with a method ``attention_logits(x)``, [B, N, D] to
[..., rows, columns] before the softmax, can be measured.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspectral.arguments import checked, real, whole
from mmspectral.ops.precision import at_least_float32


@dataclass(frozen=True)
class Saturation:
    """Statistics of attention logits.

    Args:
        entropy: Mean entropy of the attention rows, in nats.
        max_entropy: That of uniform attention, log(columns).
        largest_logit: Largest absolute logit.
    """

    entropy: float
    max_entropy: float
    largest_logit: float

    @property
    def relative_entropy(self) -> float:
        """Share of the largest possible entropy, 0 (one-hot) to 1 (uniform, also over a single column)."""
        return self.entropy / self.max_entropy if self.max_entropy else 1.0


@checked(num_tokens=whole(1), dim=whole(1), correlation=real(0), seed=whole())
def probe_tokens(num_tokens: int, dim: int, correlation: float, seed: int = 0) -> Tensor:
    """Return layer-normalised Gaussian tokens [1, N, D], float32 on the CPU, that share part of their content.

    ``correlation`` is that of two tokens, in [0, 1).

    Raises:
        ValueError: Correlation outside [0, 1).
    """
    if not 0 <= correlation < 1:
        raise ValueError(f"correlation must lie in [0, 1), got {correlation}.")
    # On the CPU also under a default device: the same tokens everywhere.
    generator = torch.Generator("cpu").manual_seed(seed)
    shared = torch.randn(1, 1, dim, generator=generator, device="cpu")
    own = torch.randn(1, num_tokens, dim, generator=generator, device="cpu")
    return F.layer_norm(math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own, (dim,))


def saturation(logits: Tensor) -> Saturation:
    """Measure attention logits [..., rows, columns] in float32 or better; masked entries are -inf."""
    logits = at_least_float32(logits.detach())
    log_attention = logits.log_softmax(dim=-1)
    entropy = -(log_attention.exp() * log_attention.masked_fill(log_attention == -torch.inf, 0.0)).sum(-1)
    finite = logits.masked_fill(logits == -torch.inf, 0.0)
    return Saturation(entropy.mean().item(), math.log(logits.shape[-1]), finite.abs().max().item())


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that can be measured, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "attention_logits")}

"""What the attention classes share: taking a module of mmpretrain over, and conditioning its projection."""

import copy

from torch import Tensor, nn

from mmspectral.layers import Conditioning, build_conditioning, condition_linear


def adopt(cls: type[nn.Module], stock: nn.Module) -> nn.Module:
    """Return an instance of ``cls`` that is ``stock`` in everything but its class.

    Parameters, children, hooks and settings are those of ``stock``, and nothing
    is initialised.

    Args:
        cls: A subclass of the class of ``stock``, or one with the same attributes.
        stock: What to take over; not to be used any more.
    """
    adopted = cls.__new__(cls)
    for name, value in vars(stock).items():
        # The dicts of parameters, children and hooks: registering one in the adopted module leaves stock alone.
        adopted.__dict__[name] = copy.copy(value) if isinstance(value, (dict, set)) else value
    return adopted


def condition_qkv(attention: nn.Module, conditioning: Conditioning | None) -> None:
    """Condition ``attention.qkv``, whose rows are all of q, all of k, then all of v, in place."""
    condition_linear(attention, "qkv", conditioning, ("q", "k", "v"), attention.num_heads)


class ConditionedAttention:
    """Mix-in of attention over a fused ``qkv``; put it before mmpretrain's class, whose arguments it takes.

    Args:
        conditioning: None, or a dict for :func:`mmspectral.layers.build_conditioning`.
    """

    def __init__(self, *args, conditioning: dict | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        condition_qkv(self, build_conditioning(conditioning))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each [B, h, N, d], of tokens [B, N, D]."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

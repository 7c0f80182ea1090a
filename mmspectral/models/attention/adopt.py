"""Take a module of mmpretrain over into a class of ours."""

import copy

from torch import nn

from mmspectral.layers import Conditioning, condition_linear


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

"""Conditioning of the fused qkv projection that mmpretrain's attention layers have."""

from torch import nn

from mmspectral.layers import build_conditioning, condition_linear


def condition_fused_projection(attention: nn.Module, conditioning: dict | None) -> None:
    """Condition ``attention.qkv``, whose rows are all of q, all of k, then all of v, in place.

    Not under ``torch.device("meta")``: a conditioning may add parameters or buffers of its own.

    Args:
        attention: With ``qkv`` and ``num_heads``.
        conditioning: None, or a dict for :func:`mmspectral.layers.build_conditioning`.
    """
    condition_linear(
        attention, "qkv", build_conditioning(conditioning), ("q", "k", "v"), attention.num_heads, "[3][heads][d]"
    )

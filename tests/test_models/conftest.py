import pytest

from mmspectral.layers import build_conditioning
from mmspectral.models.attention.adopt import adopt, condition_qkv


@pytest.fixture(scope="session")
def adopted():
    """Return a function that takes an attention layer of mmpretrain over into a class of ours, as backbones do."""

    def take_over(cls, stock, conditioning=None):
        layer = adopt(cls, stock)
        if hasattr(layer, "qkv"):
            condition_qkv(layer, build_conditioning(conditioning))
        return layer

    return take_over

"""Names under which code bases store the weights of the backbones, detected from the names themselves."""

from collections.abc import Collection

from mmspectral.checkpoints.names import davit, swin, vit, xcit
from mmspectral.checkpoints.names.naming import Family, Naming, from_mmpretrain, to_mmpretrain

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (xcit, swin, vit, davit)}

__all__ = ["FAMILIES", "Family", "Naming", "detect", "from_mmpretrain", "naming_of", "to_mmpretrain"]


def detect(names: Collection[str], family: str | None = None) -> tuple[Family, Naming | None] | None:
    """Find out whose names these are.

    Args:
        names: Names of a state dict without prefix.
        family: Name of the only family to consider.

    Returns:
        The family and its naming, None for mmpretrain's own; or None when
        nothing is recognised.
    """
    families = [FAMILIES[family]] if family else list(FAMILIES.values())
    for candidate in families:
        for naming in candidate.namings:
            if naming.recognise(names):
                return candidate, naming
        if candidate.recognise(names):
            return candidate, None
    return None


def naming_of(family: Family, name: str) -> Naming:
    """Return the naming of ``family`` that is called ``name``.

    Raises:
        ValueError: It has none.
    """
    for naming in family.namings:
        if naming.name == name:
            return naming
    known = ", ".join(naming.name for naming in family.namings)
    raise ValueError(f"the names of {family.name} weights are known from {known}, not from {name!r}.")

"""Rename the entries of a state dict by pairs of name templates, in both directions."""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

# "{i}", "{i+1}" or "{2i}": a whole number of a name, and how it follows from the index i.
_PLACEHOLDER = re.compile(r"\{(\d*)([a-z])(?:\+(\d+))?\}")

State = dict[str, Tensor]
Rules = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Template:
    """The beginning of dotted names, such as ``"stages.{i}.downsample"``."""

    text: str

    def match(self, name: str) -> tuple[dict[str, int], str] | None:
        """Return the indices in ``name`` and what stands behind the template, or None."""
        found = _pattern(self.text).match(name)
        if found is None:
            return None
        indices = {}
        for number, (factor, index, offset) in zip(found.groups(), _PLACEHOLDER.findall(self.text), strict=True):
            indices[index], rest = divmod(int(number) - int(offset or 0), int(factor or 1))
            if rest or indices[index] < 0:
                return None
        return indices, name[found.end() :]

    def fill(self, indices: Mapping[str, int]) -> str:
        """Return the text with the placeholders replaced."""
        return _PLACEHOLDER.sub(lambda m: str(int(m[1] or 1) * indices[m[2]] + int(m[3] or 0)), self.text)


@functools.cache
def _pattern(text: str) -> re.Pattern:
    parts = _PLACEHOLDER.split(text)[::4]  # split returns three groups between the literal parts
    return re.compile(r"(\d+)".join(map(re.escape, parts)) + r"(?=\.|$)")


def rename(name: str, rules: Rules, reverse: bool = False) -> str:
    """Return ``name`` under the first rule whose beginning it has; without one it stays."""
    for pair in rules:
        source, target = (Template(text) for text in (reversed(pair) if reverse else pair))
        found = source.match(name)
        if found is not None:
            indices, rest = found
            return target.fill(indices) + rest
    return name


@dataclass(frozen=True)
class Naming:
    """How another code base names the tensors of one family of backbones.

    Names are those of a classifier: the backbone's bare, the head's under ``head``.

    Args:
        name: Such as ``"timm"``.
        recognise: Whether a collection of names is in this naming.
        rules: Given a state dict in either naming, the pairs (mmpretrain's
            template, this naming's); the first that fits a name is taken.
        on_import: Changes of tensors before names become mmpretrain's.
        on_export: The opposite, after names became this naming's.
        entry: Key under which that code expects the state dict in a file.
    """

    name: str
    recognise: Callable[[Collection[str]], bool]
    rules: Callable[[Collection[str]], Rules]
    on_import: Callable[[State], State] = dict
    on_export: Callable[[State], State] = dict
    entry: str = "state_dict"


@dataclass(frozen=True)
class Family:
    """A family of backbones and the namings of its weights.

    Args:
        name: Such as ``"swin"``.
        recognise: Whether a collection of names is mmpretrain's for this family.
        namings: The others; the first that recognises names is taken.
        complete: Adds what mmpretrain's code stores and others leave out, because
            it follows from the rest.
    """

    name: str
    recognise: Callable[[Collection[str]], bool]
    namings: tuple[Naming, ...]
    complete: Callable[[State], State] = dict


def to_mmpretrain(state: Mapping[str, Tensor], naming: Naming) -> State:
    """Return a state dict in mmpretrain's names.

    Raises:
        ValueError: A tensor has not the shape that it has there.
    """
    state = _changed(naming.on_import, dict(state), naming)
    rules = naming.rules(state)
    return {rename(name, rules, reverse=True): tensor for name, tensor in state.items()}


def from_mmpretrain(state: Mapping[str, Tensor], naming: Naming) -> State:
    """Do the opposite of :func:`to_mmpretrain`, for a bare backbone and a head under ``head``; raises alike."""
    rules = naming.rules(state)
    return _changed(naming.on_export, {rename(name, rules): tensor for name, tensor in state.items()}, naming)


def _changed(change: Callable[[State], State], state: State, naming: Naming) -> State:
    try:
        return change(state)
    except (IndexError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"a tensor is missing or not of the shape that {naming.name} has: {error}") from error


def begins(beginning: str) -> Callable[[Collection[str]], bool]:
    """Return a test whether some name begins so."""
    return lambda names: any(name.startswith(beginning) for name in names)


def number_of(container: str, names: Collection[str]) -> int:
    """Return how many entries the module list ``container`` has, by the largest index in ``names``."""
    found = (re.match(rf"{container}\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def final_norm(stages: int, names: Collection[str], theirs: str) -> Rules:
    """Return the rule for the norm behind the last stage, which others give a name of its own in a classifier.

    A dense form has several, ``norm0`` and so on, in other code bases too: no rule.
    """
    last = f"norm{stages - 1}"
    several = any(re.match(r"norm\d+\.", name) and not name.startswith(f"{last}.") for name in names)
    return () if several else ((last, theirs),)

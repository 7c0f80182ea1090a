"""Keep mmpretrain importable beside transformers 5.

mmpretrain 1.2 and 1.3 import their multimodal models wherever pycocotools and transformers are installed, and these
models need functions that transformers 5 no longer has, so ``import mmpretrain.models`` fails. The switch that decides
is ``mmpretrain.utils.dependency.WITH_MULTIMODAL``; :class:`WithoutMultimodalFinder` turns it off as that module is
imported, and mmpretrain registers placeholders that raise when a multimodal model is built. Importing this file imports
nothing heavy.
"""

import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable
from types import ModuleType

SWITCH = "mmpretrain.utils.dependency"


class _WithoutMultimodalLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.WITH_MULTIMODAL = False


class WithoutMultimodalFinder:
    """Finder of ``mmpretrain.utils.dependency`` alone, for the front of ``sys.meta_path``."""

    @staticmethod
    def find_spec(
        fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with a loader that turns the switch off, or None where that is not needed."""
        if fullname != SWITCH or not is_needed():
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _WithoutMultimodalLoader(fullname, spec.origin)
        return spec


def is_needed() -> bool:
    """Return whether the installed transformers, by its metadata, is one that mmpretrain cannot use."""
    try:
        return int(importlib.metadata.version("transformers").partition(".")[0]) >= 5
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def install() -> None:
    """Put the finder at the front of ``sys.meta_path``, once, or turn the switch off where it is imported already."""
    if SWITCH in sys.modules:
        if is_needed():
            sys.modules[SWITCH].WITH_MULTIMODAL = False
    elif WithoutMultimodalFinder not in sys.meta_path:
        sys.meta_path.insert(0, WithoutMultimodalFinder)

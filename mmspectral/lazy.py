"""Packages whose names are imported when they are first used (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping


def lazy_names(package: str, names: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], object], list[str]]:
    """Return the ``__getattr__`` and the ``__all__`` of a package.

    Args:
        package: Its ``__name__``.
        names: Public names by the module of the package that has them.
    """
    module_of = {name: module for module, listed in names.items() for name in listed}

    def __getattr__(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return __getattr__, sorted(module_of)

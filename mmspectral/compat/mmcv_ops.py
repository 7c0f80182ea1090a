"""Serve mmcv's compiled extension from torchvision where nobody else has it.

mmcv's wheels without compiled operators lack the module ``mmcv._ext``, and mmdet does not import without it.
:class:`TorchvisionExtensionFinder` stands at the end of ``sys.meta_path``, so that a compiled ``_ext`` is always found
first; one that is present but broken raises its own error, since a finder that has found a module ends the search.
Importing this file imports nothing heavy.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable
from types import ModuleType

EXTENSION = "mmcv._ext"
STAND_IN = "mmspectral.compat.torchvision_ops"
MARK = "__mmspectral_stand_in__"


class TorchvisionExtensionFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of ``mmcv._ext`` alone."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for ``mmcv._ext``, or None for any other module or without torchvision.

        Raises:
            ImportError: mmcv has a compiled extension that this Python cannot load, such as one built for another
                version of Python.
        """
        if fullname != EXTENSION or importlib.util.find_spec("torchvision") is None:
            return None
        # Whatever Python can load was found before this finder was asked.
        for folder in filter(os.path.isdir, path or ()):
            for name in os.listdir(folder):
                if name.startswith("_ext.") and name.endswith((".so", ".pyd")):
                    file = os.path.join(folder, name)
                    raise ImportError(
                        f"{file} was built for another Python than {sys.version.split()[0]}; reinstall mmcv with this "
                        "Python, or remove the file to let torchvision serve mmcv's operators.",
                        name=EXTENSION,
                        path=file,
                    )
        return importlib.machinery.ModuleSpec(fullname, self, origin=STAND_IN)

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with torchvision's operators, and with one that raises for each other name.

        Every process that uses mmdet asks for this module and may read checkpoints before it has built a model, as
        mmdet's inferencer does. So what the original mmengine saves is put on torch's allow-list here.
        """
        operators = importlib.import_module(STAND_IN)
        importlib.import_module("mmspectral.compat.checkpoints").allow_mmengine_checkpoints()
        for name in operators.__all__:
            setattr(module, name, getattr(operators, name))
        module.__getattr__ = operators.unavailable
        setattr(module, MARK, True)


def install() -> None:
    """Put the finder at the end of ``sys.meta_path``, once."""
    if not any(isinstance(finder, TorchvisionExtensionFinder) for finder in sys.meta_path):
        sys.meta_path.append(TorchvisionExtensionFinder())


def mmcv_ops_backend() -> str:
    """Return who serves mmcv's operators; imports mmcv to find out.

    Returns:
        ``"compiled"``, ``"torchvision"``, ``"missing"`` (no mmcv, or neither serves them) or ``"broken: ..."`` with the
        error of a compiled extension that is present and does not load.
    """
    if importlib.util.find_spec("mmcv") is None:
        return "missing"
    try:
        extension = importlib.import_module(EXTENSION)
    except ModuleNotFoundError as error:
        return "missing" if error.name == EXTENSION else f"broken: {error}"
    except Exception as error:  # a broken binary may raise anything
        return f"broken: {error}"
    return "torchvision" if getattr(extension, MARK, False) else "compiled"

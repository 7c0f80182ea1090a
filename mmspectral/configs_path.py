"""Where the shipped configs lie, for inheritance from any directory."""

import importlib.util
from pathlib import Path


def config_root() -> Path:
    """Return the folder that holds the shipped configs.

    Raises:
        FileNotFoundError: Neither the installed package nor the checkout has
            the configs.
    """
    package = Path(__file__).resolve().parent
    for root in (package / ".mim" / "configs", package.parent / "configs"):
        if root.is_dir():
            return root
    raise FileNotFoundError(
        f"mmspectral's configs are neither in {package / '.mim'} nor beside the package; "
        "reinstall mmspectral with `pip install .` or `pip install -e .` from its repository."
    )


def config_path(name: str) -> str:
    """Return the absolute path of a shipped config.

    A config in any directory inherits with
    ``_base_ = __import__('mmspectral').config_path('xcit/...py')``.

    Args:
        name: Path below ``configs/``, such as
            ``"quickstart/mask-rcnn_spectral-xcit-nano-p8_fpn_shapes.py"``.

    Raises:
        FileNotFoundError: No such config; the message lists those in the same
            folder.
    """
    root = config_root()
    path = root / name
    if path.is_file():
        return str(path)
    folder = path.parent if path.parent.is_dir() else root
    found = sorted(str(p.relative_to(root)) for p in folder.rglob("*.py"))
    raise FileNotFoundError(
        f"mmspectral has no config {name!r}. Configs below {folder.relative_to(root.parent)}: {', '.join(found)}."
    )


def register_with_mmengine() -> None:
    """Let mmengine resolve ``_base_ = 'mmspectral::...'``.

    mmengine accepts only the packages in its own map, so ours is added to it,
    by the name of a module of ours: mmengine 0.10.7 looks for a name that is an
    installed distribution in site-packages, where an editable install has
    nothing, and for any other beside the module of that name. Does nothing
    where mmengine is not installed.
    """
    if importlib.util.find_spec("mmengine") is None:
        return
    from mmengine.config.utils import MODULE2PACKAGE

    MODULE2PACKAGE.setdefault("mmspectral", "mmspectral.version")

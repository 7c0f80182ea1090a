"""Let torchvision stand in for mmcv's compiled operators in every process of an environment.

``import mmspectral`` does so for its own process. mmdet's tools, mim, its
inferencers and notebooks import mmdet first; for them ``python -m
mmspectral.compat install`` leaves a line in site-packages that Python runs
when it starts.
"""

import argparse
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mmspectral.compat.mmcv_ops import mmcv_ops_backend

FILE_NAME = "mmspectral_compat.pth"

# Runs before editable installs are importable and in processes that never see mmcv: it imports mmspectral
# only when mmcv._ext is asked for, and finds nothing once mmspectral has been uninstalled. Some versions of Python read
# the start-up files of a virtual environment twice.
_START_UP = """\
class MmspectralCompat:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname != "mmcv._ext":
            return None
        try:
            from mmspectral.compat.mmcv_ops import TorchvisionExtensionFinder
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "mmspectral":
                raise
            return None
        return TorchvisionExtensionFinder().find_spec(fullname, path, target)
if "MmspectralCompat" not in [type(finder).__name__ for finder in sys.meta_path]:
    sys.meta_path.append(MmspectralCompat())
"""
LINE = f"import sys; exec({_START_UP!r})\n"


def start_up_file() -> Path:
    """Return where the running interpreter's ``.pth`` file belongs, whether it exists or not."""
    return Path(sysconfig.get_path("purelib")) / FILE_NAME


def install(file: Path) -> None:
    """Write the ``.pth`` file; processes that start meanwhile see the old one or the new one.

    Raises:
        OSError: The folder is missing or not writable.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(LINE, encoding="utf-8")
        unfinished.replace(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def uninstall(file: Path) -> bool:
    """Remove the ``.pth`` file and return whether there was one.

    Raises:
        OSError: The folder is not writable.
    """
    existed = file.exists()
    file.unlink(missing_ok=True)
    return existed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mmspectral.compat", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="serve the operators in every process of this environment")
    commands.add_parser("uninstall", help="undo install")
    commands.add_parser("status", help="say who serves the operators; fails when nobody does")
    command = parser.parse_args(arguments).command
    file = start_up_file()
    if command == "status":
        backend = mmcv_ops_backend()
        print(f"mmcv's operators: {backend}")
        print(f"start-up file: {file if file.exists() else 'none'}")
        return 0 if backend in ("compiled", "torchvision") else 1
    try:
        if command == "install":
            install(file)
            print(f"wrote {file}: torchvision serves mmcv's operators wherever mmcv has no compiled ones")
        else:
            print(f"removed {file}" if uninstall(file) else f"there was no {file}")
    except OSError as error:
        print(
            f"cannot {command} {file}: {error.strerror}. "
            "Run this with the Python of an environment that you may write to, such as a virtual environment.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Let mmcv and mmpretrain work in every process of an environment.

``import mmspectral`` does so for its own process: torchvision stands in for mmcv's compiled operators, and mmpretrain
imports beside transformers 5. mmdet's tools, mim, its inferencers and notebooks import mmdet first; for them ``python
-m mmspectral.compat install`` leaves a line in site-packages that Python runs when it starts.
"""

import argparse
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mmspectral.compat.atomic_write import write_atomically
from mmspectral.compat.mmcv_ops import mmcv_ops_backend

FILE_NAME = "mmspectral_compat.pth"

# Runs before editable installs are importable and in processes that never see OpenMMLab: it imports mmspectral only
# when one of two modules is asked for, and finds nothing once mmspectral has been uninstalled. It asks last about
# mmcv._ext, so that a compiled one is found first. Some versions of Python read a start-up file twice.
_START_UP = """\
class MmspectralCompat:
    def __init__(self, module, place, finder):
        self.module, self.place, self.finder = module, place, finder
    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module:
            return None
        try:
            place = __import__(self.place, fromlist=[self.finder])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "mmspectral":
                raise
            return None
        return getattr(place, self.finder)().find_spec(fullname, path, target)
if "MmspectralCompat" not in [type(finder).__name__ for finder in sys.meta_path]:
    sys.meta_path.append(MmspectralCompat("mmcv._ext", "mmspectral.compat.mmcv_ops", "TorchvisionExtensionFinder"))
    sys.meta_path.insert(0, MmspectralCompat(
        "mmpretrain.utils.dependency", "mmspectral.compat.multimodal", "WithoutMultimodalFinder"))
"""
LINE = f"import sys; exec({_START_UP!r})\n"


def start_up_file() -> Path:
    """Return where the running interpreter's ``.pth`` file belongs, whether it exists or not."""
    return Path(sysconfig.get_path("purelib")) / FILE_NAME


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mmspectral.compat", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="serve every process of this environment")
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
            write_atomically(LINE.encode(), file)
            print(f"wrote {file}: mmcv's operators and mmpretrain's import are served in every process")
        elif file.exists():
            file.unlink()
            print(f"removed {file}")
        else:
            print(f"there was no {file}")
    except OSError as error:
        print(
            f"cannot {command} {file}: {error} "
            "Run this with the Python of an environment that you may write to, such as a virtual environment.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

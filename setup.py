"""Packaging of mmspectral.

mmengine and mim look for an installed package's configs in ``<package>/.mim``. An editable install gets links there;
a wheel gets copies, written into the build folder and never into the source tree.
"""

import runpy
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Name in .mim -> path in the repository.
MIM = {"configs": "configs", "tools": "tools", "model-index.yml": "configs/model-index.yml"}


class BuildWithConfigs(build_py):
    """Put configs and tools into the wheel, and into the source distribution that a wheel may be built from."""

    def _assets(self):
        for name, source in MIM.items():
            files = sorted(Path(source).rglob("*")) if Path(source).is_dir() else [Path(source)]
            for file in files:
                if file.is_file() and "__pycache__" not in file.parts:
                    yield str(file), Path("mmspectral", ".mim", name, file.relative_to(source))

    def run(self):
        super().run()
        if self.editable_mode:
            return
        # A build folder left by an earlier build may hold configs that are gone since.
        shutil.rmtree(Path(self.build_lib, "mmspectral", ".mim"), ignore_errors=True)
        for source, target in self._assets():
            self.mkpath(str(Path(self.build_lib, target.parent)))
            self.copy_file(source, str(Path(self.build_lib, target)))

    def get_source_files(self):
        return super().get_source_files() + sorted({source for source, _ in self._assets()})


def link_mim():
    """Link configs and tools into the package, for editable installs."""
    folder = ROOT / "mmspectral" / ".mim"
    folder.mkdir(exist_ok=True)
    for name, source in MIM.items():
        link = folder / name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise FileExistsError(f"{link} is not a link made by this script; move it away and install again.")
        link.symlink_to(Path("..", "..", source))


if __name__ == "__main__":
    # pip passes editable_wheel (PEP 660); older releases of pip pass develop.
    if {"develop", "editable_wheel"} & set(sys.argv):
        link_mim()
    requirements = runpy.run_path(str(ROOT / "mmspectral" / "compat" / "environment.py"))
    setup(
        name="mmspectral",
        version=runpy.run_path(str(ROOT / "mmspectral" / "version.py"))["__version__"],
        description="Spectral conditioning and data-aware random-feature attention for OpenMMLab",
        license="Apache-2.0",
        python_requires=">=3.10",
        packages=find_packages(include=["mmspectral", "mmspectral.*"]),
        cmdclass={"build_py": BuildWithConfigs},
        # Layers and ops need torch alone. The wide range keeps pip from replacing the torch that is there.
        install_requires=[requirements["FRAMEWORKS"][0]],
        extras_require={name: list(needed) for name, needed in requirements["EXTRAS"].items()},
        zip_safe=False,
    )

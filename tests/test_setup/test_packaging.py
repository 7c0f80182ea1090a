"""The wheel holds the package and the configs, whichever setuptools builds it."""

import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from mmspectral.compat.environment import EXTRAS
from tests.helpers import ROOT, output_of, run

VERSION = runpy.run_path(str(ROOT / "mmspectral" / "version.py"))["__version__"]
SETUPTOOLS = ("setuptools==65.*", "setuptools==80.*", "setuptools>=82")
# tools/run_tests.sh puts the checkout on PYTHONPATH, where a clean environment must not find it.
CLEAN = dict(PYTHONPATH="")


def copy_of_checkout(folder):
    """Copy what is built, so that no test writes into the real tree."""
    for name in ("mmspectral", "configs", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".mim"))
    for name in ("setup.py", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def checkout(tmp_path):
    return copy_of_checkout(tmp_path / "checkout")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel whose checkout is gone."""
    checkout = copy_of_checkout(tmp_path_factory.mktemp("wheel") / "checkout")
    built = build(checkout).rename(checkout.parent / "built.whl")
    shutil.rmtree(checkout)
    return built


def build(checkout, command="bdist_wheel"):
    """Build with setup.py's own commands, which is what pip's build back end runs; needs no network."""
    output_of(sys.executable, "setup.py", "-q", command, "--dist-dir", "out", cwd=checkout, **CLEAN)
    (result,) = (checkout / "out").iterdir()
    return result


def tree(folder):
    return {
        str(p.relative_to(folder.parent)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }


def contents_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_wheel_holds_package_configs_and_tools_only(wheel):
    names = {name for name in contents_of(wheel) if ".dist-info/" not in name}
    mim = {f"mmspectral/.mim/{name}" for name in tree(ROOT / "configs") | tree(ROOT / "tools")}
    package = {name for name in tree(ROOT / "mmspectral") if name.endswith(".py") and "/.mim/" not in name}
    assert names == package | mim | {"mmspectral/.mim/model-index.yml"}
    (metadata,) = (text.decode() for name, text in contents_of(wheel).items() if name.endswith("/METADATA"))
    assert f"\nVersion: {VERSION}\n" in metadata and "\nRequires-Python: >=3.10\n" in metadata
    required = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert [r for r in required if "extra ==" not in r] == ["torch>=2.4"]
    extras = {line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert extras == set(EXTRAS)


def test_installed_wheel_finds_its_configs(wheel, tmp_path):
    """In an environment that holds nothing else, away from any checkout."""
    venv.create(tmp_path / "env", with_pip=False)
    inside = tmp_path / "env" / "bin" / "python"
    site = Path(output_of(inside, "-c", "import site; print(site.getsitepackages()[0])", **CLEAN).strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = "import mmspectral; print(mmspectral.config_path('model-index.yml')); print(mmspectral.__version__)"
    path, version = output_of(inside, "-c", code, cwd=tmp_path, **CLEAN).split()
    assert path == str(site / "mmspectral" / ".mim" / "configs" / "model-index.yml")
    assert version == VERSION


def test_wheel_from_source_distribution_equals_wheel_from_checkout(wheel, checkout, tmp_path):
    shutil.unpack_archive(build(checkout, "sdist"), tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents_of(build(unpacked)) == contents_of(wheel)


def test_editable_install_links_configs_and_a_wheel_build_leaves_the_links(checkout, tmp_path):
    """A wheel built before holds a config that has gone since, and the next one does not."""
    extra = checkout / "configs" / "gone.py"
    extra.touch()
    first = build(checkout)
    assert "mmspectral/.mim/configs/gone.py" in contents_of(first)
    extra.unlink()
    first.unlink()
    before = tree(checkout / "configs")
    command = (sys.executable, "setup.py", "-q", "editable_wheel", "--dist-dir", tmp_path / "editable")
    for _ in range(2):  # A second install replaces the links and must not follow them.
        output_of(*command, cwd=checkout, **CLEAN)
    assert "mmspectral/.mim/configs/gone.py" not in contents_of(build(checkout))
    mim = checkout / "mmspectral" / ".mim"
    assert {p.name for p in mim.iterdir() if p.is_symlink() and p.exists()} == {"configs", "tools", "model-index.yml"}
    assert tree(checkout / "configs") == before
    (mim / "configs").unlink()
    (mim / "configs").mkdir()
    refused = run(*command, cwd=checkout, **CLEAN)
    assert refused.returncode != 0 and "not a link made by this script" in refused.stderr


def environments():
    """This machine's interpreters, each with the releases of setuptools that run on it."""
    for minor in range(10, 14):
        # A pyenv shim is on PATH, but runs only where its version is selected.
        candidates = [f"python3.{minor}", *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        for python in candidates:
            if shutil.which(python) and not subprocess.run([python, "-V"], capture_output=True).returncode:
                # Python 3.12 took out what pkg_resources of setuptools 65 is built on.
                usable = SETUPTOOLS if minor < 12 else SETUPTOOLS[1:]
                yield from (pytest.param(python, release, id=f"3.{minor}-{release}") for release in usable)
                break


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("python", "setuptools"), list(environments()))
def test_installs_in_a_clean_environment(checkout, tmp_path, python, setuptools):
    """An install that depends on one setuptools or on pkg_resources fails here."""
    output_of(python, "-m", "venv", tmp_path / "env", **CLEAN)
    inside = tmp_path / "env" / "bin" / "python"
    output_of(inside, "-m", "pip", "install", "-q", setuptools, "wheel", **CLEAN)
    output_of(inside, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", checkout, **CLEAN)
    shutil.rmtree(checkout)
    code = "import mmspectral; print(mmspectral.config_path('model-index.yml'))"
    found = output_of(inside, "-c", code, cwd=tmp_path, **CLEAN).strip()
    assert found.startswith(str(tmp_path / "env")) and found.endswith("/mmspectral/.mim/configs/model-index.yml")

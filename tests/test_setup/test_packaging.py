"""The wheel holds the package and the configs, whichever setuptools builds it."""

import os
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = runpy.run_path(str(ROOT / "mmspectral" / "version.py"))["__version__"]
SETUPTOOLS = ("setuptools==65.*", "setuptools==80.*", "setuptools>=82")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what is built, so that no test writes into the real tree."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("mmspectral", "configs", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".mim"))
    for name in ("setup.py", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def run(*command, cwd=None):
    # tools/run_tests.sh puts the checkout on PYTHONPATH, where a clean environment must not find it.
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(python, checkout, *command):
    """Build with setup.py's own commands, which is what pip's build back end runs; needs no network."""
    run(python, "setup.py", "-q", *command, "--dist-dir", "out", cwd=checkout)
    (result,) = (checkout / "out").iterdir()
    return result


def wheel_from(checkout):
    return build(sys.executable, checkout, "bdist_wheel")


def tree(folder):
    return {
        str(p.relative_to(folder.parent)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }


def test_wheel_holds_package_configs_and_tools_only(checkout):
    wheel = wheel_from(checkout)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        index = archive.read("mmspectral/.mim/model-index.yml").decode()
        (metadata,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("/METADATA"))
    mim = {f"mmspectral/.mim/{name}" for name in tree(ROOT / "configs") | tree(ROOT / "tools")}
    package = {name for name in tree(checkout / "mmspectral") if name.endswith(".py")}
    assert names == package | mim | {"mmspectral/.mim/model-index.yml"}
    assert index == (ROOT / "configs" / "model-index.yml").read_text()
    assert f"\nVersion: {VERSION}\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata


def test_no_extra_names_both_families(checkout):
    with zipfile.ZipFile(wheel_from(checkout)) as archive:
        (metadata,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("/METADATA"))
    required = [
        line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")
    ]
    by_extra = {
        extra: [r.split(";")[0] for r in required if f'extra == "{extra}"' in r.replace("'", '"')]
        for extra in ("onedl", "openmmlab", "tests")
    }
    assert {r for r in required if "extra ==" not in r} == {"torch>=2.4"}
    assert all(by_extra.values())
    assert not any(r.startswith(("mmcv", "mmengine", "mmdet", "mmpretrain")) for r in by_extra["onedl"])
    assert not any(r.startswith("onedl-") for r in by_extra["openmmlab"] + by_extra["tests"])
    assert any(r.startswith("faster-coco-eval") for r in by_extra["onedl"])


def test_wheel_from_source_distribution_equals_wheel_from_checkout(checkout, tmp_path):
    archive = build(sys.executable, checkout, "sdist")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    shutil.rmtree(checkout / "out")
    with zipfile.ZipFile(wheel_from(unpacked)) as ours, zipfile.ZipFile(wheel_from(checkout)) as direct:
        contents = [
            {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
            for archive in (ours, direct)
        ]
    assert contents[0] == contents[1]


def test_editable_install_links_configs_and_a_wheel_build_leaves_the_links(checkout, tmp_path):
    before = tree(checkout / "configs")
    for _ in range(2):  # A second install replaces the links and must not follow them.
        run(sys.executable, "setup.py", "-q", "editable_wheel", "--dist-dir", tmp_path / "editable", cwd=checkout)
    wheel_from(checkout)
    mim = checkout / "mmspectral" / ".mim"
    assert {p.name: p.is_symlink() and p.exists() for p in mim.iterdir()} == {
        "configs": True,
        "tools": True,
        "model-index.yml": True,
    }
    assert tree(checkout / "configs") == before


def test_editable_install_refuses_to_replace_a_real_folder(checkout, tmp_path):
    (checkout / "mmspectral" / ".mim" / "configs").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "editable_wheel", "--dist-dir", str(tmp_path)],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "not a link made by this script" in done.stderr


def test_a_config_deleted_since_the_last_build_is_not_shipped(checkout):
    extra = checkout / "configs" / "gone.py"
    extra.write_text("")
    first = wheel_from(checkout)
    with zipfile.ZipFile(first) as archive:
        assert "mmspectral/.mim/configs/gone.py" in archive.namelist()
    extra.unlink()
    first.unlink()
    with zipfile.ZipFile(wheel_from(checkout)) as archive:
        assert "mmspectral/.mim/configs/gone.py" not in archive.namelist()


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
    """users.md E20: an install that depends on one setuptools or on pkg_resources fails here."""
    run(python, "-m", "venv", tmp_path / "env")
    inside = tmp_path / "env" / "bin" / "python"
    run(inside, "-m", "pip", "install", "-q", setuptools, "wheel")
    run(inside, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", checkout)
    shutil.rmtree(checkout)
    code = (
        "import mmspectral, pathlib;"
        "root = pathlib.Path(mmspectral.__file__).parent;"
        "print(mmspectral.config_path('model-index.yml') == str(root / '.mim/configs/model-index.yml'))"
    )
    assert run(inside, "-c", code, cwd=tmp_path).strip() == "True"


def test_installed_wheel_finds_its_configs(checkout, tmp_path):
    """In an environment that holds nothing else, away from any checkout."""
    wheel = wheel_from(checkout)
    venv.create(tmp_path / "env", with_pip=False)
    inside = tmp_path / "env" / "bin" / "python"
    site = Path(run(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.rmtree(checkout)
    code = "import mmspectral; print(mmspectral.config_path('model-index.yml')); print(mmspectral.__version__)"
    path, version = run(inside, "-c", code, cwd=tmp_path).split()
    assert path == str(site / "mmspectral" / ".mim" / "configs" / "model-index.yml")
    assert version == VERSION

"""tools/check_env.py names what is missing, why that matters, and the command that mends it (users.md E21)."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK_ENV = ROOT / "tools" / "check_env.py"

# Python imports sitecustomize from PYTHONPATH before the script: what it hides is hidden from the whole process.
HIDE = """
import importlib.machinery, importlib.metadata, json, os, sys

hidden = json.loads(os.environ["HIDDEN"])

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden["modules"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())

find_on_path = importlib.machinery.PathFinder.find_spec
def without_extension(name, path=None, target=None):
    return None if name == "mmcv._ext" else find_on_path(name, path, target)
importlib.machinery.PathFinder.find_spec = without_extension
real_listdir = os.listdir
os.listdir = lambda folder=".": [name for name in real_listdir(folder) if not name.startswith("_ext.")]

real_version = importlib.metadata.version
def version(name):
    if name in hidden["distributions"]:
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)
importlib.metadata.version = version
"""


@pytest.fixture
def environment():
    spec = importlib.util.spec_from_file_location("environment_under_test", ROOT / "mmspectral/compat/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def python_without(tmp_path):
    """Run this interpreter without some packages, and always without mmcv's compiled extension."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)

    def run(*command, modules=(), distributions=()):
        hidden = {"modules": list(modules), "distributions": list(distributions)}
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        env = {**os.environ, "PYTHONPATH": path, "HIDDEN": json.dumps(hidden)}
        done = subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout

    return run


@pytest.fixture
def installed(environment, monkeypatch):
    """Pretend that exactly these distributions are installed."""

    def pretend(versions):
        def version(name):
            if name in versions:
                return versions[name]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        return environment

    return pretend


ONEDL = {
    "torch": "2.14.1+cu130",
    "torchvision": "0.29.1",
    "onedl-mmengine": "0.10.12",
    "onedl-mmcv": "2.3.6",
    "onedl-mmdetection": "3.5.1",
    "onedl-mmpretrain": "1.3.6",
}
OPENMMLAB = {
    "torch": "2.4.0",
    "torchvision": "0.19.0",
    "mmengine": "0.10.7",
    "mmcv": "2.1.0",
    "mmdet": "3.3.0",
    "mmpretrain": "1.2.0",
    "setuptools": "81.0",
}


def problems(findings):
    return {f.subject: f for f in findings if f.level != "ok"}


@pytest.mark.parametrize(
    "versions",
    [
        ONEDL,
        OPENMMLAB,
        {**{k: v for k, v in OPENMMLAB.items() if k != "mmcv"}, "mmcv-lite": "2.1.0"},
        {**ONEDL, "torch": "2.15.0.dev20260901+cu130"},
    ],
    ids=["onedl", "openmmlab", "mmcv-lite", "nightly torch"],
)
def test_each_supported_set_is_accepted(installed, versions):
    assert problems(installed(versions).check_versions()) == {}


@pytest.mark.parametrize(
    ("versions", "name", "version"),
    [
        ({**ONEDL, "torch": "2.3.1"}, "torch", "2.3.1"),
        # mmdet 3.3.0 refuses mmcv 2.2.0 when it is imported.
        ({**OPENMMLAB, "mmcv": "2.2.0"}, "mmcv", "2.2.0"),
        # mmengine 0.10 imports pkg_resources.
        ({**OPENMMLAB, "setuptools": "82.0"}, "setuptools", "82.0"),
    ],
)
def test_version_outside_its_range_is_reported(installed, versions, name, version):
    (finding,) = problems(installed(versions).check_versions()).values()
    assert (finding.level, finding.subject) == ("error", name)
    assert f"{version} is installed" in finding.detail
    assert f"-m pip install '{name}" in finding.remedy


def test_missing_torchvision_is_asked_for_with_the_torch_that_is_there(installed):
    versions = {k: v for k, v in ONEDL.items() if k != "torchvision"}
    (finding,) = problems(installed(versions).check_versions()).values()
    assert "torch==2.14.1+cu130" in finding.remedy


@pytest.mark.parametrize(
    ("versions", "families"),
    [(ONEDL, "onedl"), (OPENMMLAB, "openmmlab"), ({**OPENMMLAB, **ONEDL}, "onedl and openmmlab"), ({}, "none")],
)
def test_the_report_names_the_family(installed, monkeypatch, versions, families):
    environment = installed(versions)
    # The report ends with torch when that cannot be imported.
    monkeypatch.setattr(environment, "_check_import", lambda *_: [environment.Finding("error", "torch", "not tried")])
    (finding,) = [f for f in environment.check_environment() if f.subject == "family"]
    assert finding.detail == families


@pytest.mark.parametrize(
    ("versions", "family", "missing"),
    [(ONEDL, "openmmlab", "mmcv-lite"), (OPENMMLAB, "onedl", "onedl-mmcv"), (ONEDL, "onedl", None)],
)
def test_one_family_can_be_asked_for(installed, versions, family, missing):
    found = problems(installed(versions).check_versions(family=family))
    assert (missing in found) if missing else found == {}


def test_both_families_give_a_warning_that_removes_both(installed):
    found = problems(installed({**OPENMMLAB, **ONEDL, "setuptools": "81.0"}).check_versions())
    assert list(found) == ["families"]
    assert found["families"].level == "warning"
    removal, _, installation = found["families"].remedy.partition(" && ")
    for name in ("mmcv", "mmdet", "mmengine", "mmpretrain", "onedl-mmcv", "onedl-mmdetection"):
        assert name in removal.split()
    assert "onedl-mmcv>=2.3.6" in installation
    assert " 'mmcv" not in installation


def test_test_tools_are_asked_for_only_when_wanted(installed):
    environment = installed(ONEDL)
    assert "pytest" not in problems(environment.check_versions())
    assert "pytest" in problems(environment.check_versions(tests=True))


@pytest.mark.parametrize("family", ["onedl", "openmmlab"])
def test_the_constraints_satisfy_the_requirements(installed, family):
    files = [ROOT / "tools" / name for name in ("constraints.txt", f"constraints-{family}.txt")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    pins = dict(line.split(" ;")[0].split("==") for line in lines if line and not line.startswith("#"))
    assert problems(installed(pins).check_versions(tests=True, family=family)) == {}


def test_versions_only_is_silent_when_all_is_there_and_imports_no_torch(python_without):
    # torch cannot be imported here, and is not missed: its metadata says that it is installed.
    assert python_without(CHECK_ENV, "--versions-only", "--tests", modules=["torch"]) == (0, "")


def test_versions_only_fails_on_what_is_missing(python_without):
    status, output = python_without(CHECK_ENV, "--versions-only", distributions=["onedl-mmcv", "mmcv", "mmcv-lite"])
    assert status == 1
    assert "not installed" in output
    assert output.count("mend: ") == 1


def test_complete_environment_can_run_mask_rcnn(python_without):
    status, output = python_without(CHECK_ENV)
    assert status == 0, output
    assert output.endswith("Mask R-CNN can run here: yes\n")
    assert "mmcv.ops: torchvision stands in for mmcv._ext" in output
    assert "mmcv.ops on cpu: RoIAlign and NMS give the expected values" in output
    assert "error" not in output


def test_without_torchvision_and_without_extension(python_without):
    status, output = python_without(CHECK_ENV, modules=["torchvision"], distributions=["torchvision"])
    assert status == 1
    assert "error   torchvision: not installed" in output
    assert "-m pip install 'torchvision>=0.19' torch==" in output
    assert output.endswith("Mask R-CNN can run here: no\n")


def test_without_torch_the_report_still_comes(python_without):
    status, output = python_without(CHECK_ENV, modules=["torch"], distributions=["torch"])
    assert status == 1
    assert "error   torch: not installed" in output
    assert "not tried: torch cannot be imported" in output


def test_installed_but_broken_mmdet_is_an_error(python_without):
    status, output = python_without(CHECK_ENV, modules=["pycocotools"])
    assert status == 1
    assert "error   import mmdet.models: ModuleNotFoundError: No module named 'pycocotools'" in output
    assert "mend: " in output
    assert "-m pip install pycocotools" in output


def test_backbones_import_without_the_extension(python_without):
    code = "from mmspectral.registry import MODELS; print(MODELS.get('mmspectral.SpectralXCiT').__name__)"
    assert python_without("-c", code) == (0, "SpectralXCiT\n")


@pytest.mark.parametrize(
    ("backend", "words", "remedy"),
    [
        ("missing", "mmcv._ext is absent", "torchvision"),
        ("broken: undefined symbol: _ZN3c10", "undefined symbol: _ZN3c10", "--no-cache-dir"),
    ],
)
def test_unusable_operators_are_an_error_with_a_remedy(environment, monkeypatch, backend, words, remedy):
    monkeypatch.setattr("mmspectral.compat.mmcv_ops_backend", lambda: backend)
    (finding,) = environment._check_operators("onedl-mmcv>=2.3.6")
    assert finding.level == "error"
    assert words in finding.detail
    assert remedy in finding.remedy


def test_operators_that_compute_something_else_are_an_error(environment, monkeypatch):
    importlib.import_module("mmspectral")  # offers torchvision's operators to mmcv
    monkeypatch.setattr("mmcv.ops.nms", lambda boxes, scores, iou_threshold: (boxes, scores.long()))
    finding = environment._try_operators("cpu", "the remedy")
    assert (finding.level, finding.remedy) == ("error", "the remedy")
    assert "nms kept [0, 0, 0]" in finding.detail


@pytest.mark.parametrize(
    ("error", "module", "expected"),
    [
        (ImportError("libGL.so.1: cannot open shared object file"), "cv2", "opencv-python-headless"),
        (RuntimeError("operator torchvision::nms does not exist"), "torchvision", "torchvision release that belongs"),
        (AssertionError("MMCV==2.2.0 is used but incompatible"), "mmdet.models", "--force-reinstall"),
        (ModuleNotFoundError("No module named 'scipy'", name="scipy"), "mmdet.models", "pip install scipy"),
        (ModuleNotFoundError("No module named 'mmdet'", name="mmdet"), "mmdet.models", "pip install 'needed>=1'"),
    ],
)
def test_remedy_fits_the_cause(environment, error, module, expected):
    requirement = "opencv-python-headless" if module == "cv2" else "needed>=1"
    assert expected in environment._import_remedy(error, module, requirement)

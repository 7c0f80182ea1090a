"""tools/check_env.py names what is missing, why that matters, and the command that installs it."""

import importlib.metadata
import json
import sys

import pytest

from mmspectral.compat import environment, mmcv_ops_backend
from tests.helpers import ROOT, TOOLS, run

# Python imports sitecustomize from PYTHONPATH before the script: what it hides is hidden from the whole process.
HIDE = """
import importlib.metadata, json, os, sys

hidden = json.loads(os.environ["HIDDEN"])

sys.modules.update(dict.fromkeys(hidden["modules"]))
real_version = importlib.metadata.version
def version(name):
    if name in hidden["distributions"]:
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)
importlib.metadata.version = version
"""
ONEDL = {"torch": "2.14.1+cu130", "torchvision": "0.29.1", "onedl-mmengine": "0.10.12", "onedl-mmcv": "2.3.6"}
ONEDL |= {"onedl-mmdetection": "3.5.1", "onedl-mmpretrain": "1.3.6"}
OPENMMLAB = dict(torch="2.4.0", torchvision="0.19.0", mmengine="0.10.7", mmcv="2.1.0", mmdet="3.3.0")
OPENMMLAB |= dict(mmpretrain="1.2.0", setuptools="81.0")


@pytest.fixture
def python_without(tmp_path):
    """Run check_env.py without some packages."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)

    def check(*arguments, modules=(), distributions=()):
        hidden = json.dumps({"modules": list(modules), "distributions": list(distributions)})
        done = run(sys.executable, TOOLS / "check_env.py", *arguments, path=(tmp_path, ROOT), HIDDEN=hidden)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout

    return check


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions are installed."""

    def pretend(versions):
        def version(name):
            if versions.get(name):
                return versions[name]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        return environment

    return pretend


def problems(findings):
    return {f.subject: f for f in findings if f.level != "ok"}


@pytest.mark.parametrize(
    ("versions", "family", "missing"),
    [
        (ONEDL, None, None),
        (OPENMMLAB, None, None),
        ({**OPENMMLAB, "mmcv": None, "mmcv-lite": "2.1.0"}, None, None),
        ({**ONEDL, "torch": "2.15.0.dev20260901+cu130"}, None, None),
        (ONEDL, "onedl", None),
        (ONEDL, "openmmlab", "mmcv-lite"),
        (OPENMMLAB, "onedl", "onedl-mmcv"),
    ],
)
def test_each_supported_set_is_accepted_and_no_other(installed, versions, family, missing):
    found = problems(installed(versions).check_versions(family=family))
    assert (missing in found) if missing else found == {}


@pytest.mark.parametrize(
    ("versions", "name", "remedy"),
    [
        ({**ONEDL, "torch": "2.3.1"}, "torch", "-m pip install 'torch>=2.4'"),
        # mmdet 3.3.0 refuses mmcv 2.2.0 when it is imported, and mmengine 0.10 imports pkg_resources.
        ({**OPENMMLAB, "mmcv": "2.2.0"}, "mmcv", "-m pip install 'mmcv"),
        ({**OPENMMLAB, "setuptools": "82.0"}, "setuptools", "-m pip install 'setuptools<82'"),
        # Together with the torch that is there.
        ({**ONEDL, "torchvision": None}, "torchvision", "torch==2.14.1+cu130"),
    ],
)
def test_a_version_that_is_missing_or_outside_its_range_is_reported(installed, versions, name, remedy):
    (finding,) = problems(installed(versions).check_versions()).values()
    assert (finding.level, finding.subject) == ("error", name)
    assert (versions[name] or "not installed") in finding.detail
    assert remedy in finding.remedy


def test_both_families_give_a_warning_that_removes_both(installed):
    found = problems(installed({**OPENMMLAB, **ONEDL, "setuptools": "81.0"}).check_versions())
    assert [(name, finding.level) for name, finding in found.items()] == [("families", "warning")]
    removal, _, installation = found["families"].remedy.partition(" && ")
    assert {"mmcv", "mmdet", "mmengine", "mmpretrain", "onedl-mmcv", "onedl-mmdetection"} <= set(removal.split())
    assert "onedl-mmcv>=2.3.6" in installation and " 'mmcv" not in installation


@pytest.mark.parametrize("family", ["onedl", "openmmlab"])
def test_the_constraints_satisfy_the_requirements_of_the_tests(installed, family):
    assert "pytest" in problems(installed(ONEDL).check_versions(tests=True))
    lines = [
        line.partition(" ;")[0]
        for name in ("constraints.txt", f"constraints-{family}.txt")
        for line in (TOOLS / name).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pins = dict(line.split("==") for line in lines)
    assert problems(installed(pins).check_versions(tests=True, family=family)) == {}


def test_versions_only_is_silent_when_all_is_there_and_imports_no_torch(python_without):
    # torch cannot be imported here, and is not missed: its metadata says that it is installed.
    assert python_without("--versions-only", "--tests", modules=["torch"]) == (0, "")
    status, output = python_without("--versions-only", distributions=["onedl-mmcv", "mmcv", "mmcv-lite"])
    assert status == 1 and "not installed" in output and output.count("remedy: ") == 1


def test_complete_environment_can_run_mask_rcnn(python_without):
    status, output = python_without()
    assert status == 0, output
    assert output.endswith("Mask R-CNN can run here: yes\n")
    assert ("mmcv.ops: torchvision stands in for mmcv._ext" in output) == (mmcv_ops_backend() == "torchvision")
    assert "mmcv.ops on cpu: RoIAlign and NMS give the expected values" in output
    assert "error" not in output


@pytest.mark.parametrize(
    ("modules", "distributions", "subject", "remedy"),
    [
        (["torchvision", "torch"], ["torchvision", "torch"], "torchvision: not installed", "torchvision>=0.19"),
        (["cv2"], [], "import cv2: ModuleNotFoundError", "opencv-python-headless"),
    ],
)
def test_a_missing_package_is_an_error_with_a_remedy(python_without, modules, distributions, subject, remedy):
    status, output = python_without(modules=modules, distributions=distributions)
    assert status == 1 and output.endswith("Mask R-CNN can run here: no\n")
    assert f"error   {subject}" in output and remedy in output.partition("remedy: ")[2]


@pytest.mark.parametrize(
    ("backend", "remedy"), [("missing", "torchvision"), ("broken: undefined symbol: _ZN3c10", "--no-cache-dir")]
)
def test_unusable_operators_are_an_error_with_a_remedy(monkeypatch, backend, remedy):
    monkeypatch.setattr("mmspectral.compat.mmcv_ops_backend", lambda: backend)
    (finding,) = environment._check_operators("onedl-mmcv>=2.3.6")
    assert finding.level == "error" and backend.rpartition(" ")[2] in finding.detail and remedy in finding.remedy


def test_operators_that_compute_something_else_are_an_error(monkeypatch):
    monkeypatch.setattr("mmcv.ops.nms", lambda boxes, scores, iou_threshold: (boxes, scores.long()))
    finding = environment._try_operators("cpu", "the remedy")
    assert (finding.level, finding.remedy) == ("error", "the remedy")
    assert "nms kept [0, 0, 0]" in finding.detail


def test_transformers_5_is_named_as_the_cause_of_missing_multimodal_models(installed):
    assert installed({**ONEDL, "transformers": "4.57.1"})._check_multimodal() == []
    (finding,) = installed({**ONEDL, "transformers": "5.24.0"})._check_multimodal()
    assert (finding.level, finding.subject) == ("note", "transformers 5.24.0")


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
def test_remedy_fits_the_cause(error, module, expected):
    requirement = "opencv-python-headless" if module == "cv2" else "needed>=1"
    assert expected in environment._import_remedy(error, module, requirement)

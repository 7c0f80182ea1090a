"""The start-up file in a virtual environment of its own: there, nobody imports mmspectral first."""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from mmspectral.compat import __main__ as command_line
from mmspectral.compat import mmcv_ops_backend
from tests.helpers import ROOT, run


@pytest.fixture
def python(tmp_path):
    """Interpreter of a bare virtual environment without pip."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=os.name != "nt")
    return str(tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


@pytest.fixture
def site_packages(python):
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-c", code], text=True).strip())


def test_mmdet_works_where_nobody_imports_mmspectral(python, site_packages, tmp_path):
    (site_packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    assert run(python, "-m", "mmspectral.compat", "install").returncode == 0
    code = (
        "import sys\nassert not {'mmspectral', 'torch'} & set(sys.modules)\n"
        "import mmdet.models, mmpretrain.models, mmcv.ops, torch\n"
        "boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0], [0.0, 0.0, 8.0, 7.0], [20.0, 20.0, 24.0, 24.0]])\n"
        "print(mmcv.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5)[1].tolist(), 'mmspectral' in sys.modules)"
    )
    result = run(python, "-c", code, cwd=tmp_path)
    asked = mmcv_ops_backend() == "torchvision"  # a compiled extension needs no stand-in
    assert result.stdout.strip().endswith(f"[0, 2] {asked}"), result.stderr


def test_install_status_uninstall(python, site_packages, fake_mmcv):
    file = site_packages / "mmspectral_compat.pth"

    def call(command):
        result = run(python, "-m", "mmspectral.compat", command, path=(fake_mmcv.parent, ROOT))
        return result.returncode, result.stdout + result.stderr

    # No torchvision in this environment, so nobody serves the operators.
    assert call("status") == (1, "mmcv's operators: missing\nstart-up file: none\n")
    code, text = call("install")
    assert code == 0 and text.startswith(f"wrote {file}")
    assert call("install") == (0, text)
    assert [p.name for p in site_packages.iterdir() if "mmspectral" in p.name] == [file.name]
    assert call("status") == (1, f"mmcv's operators: missing\nstart-up file: {file}\n")
    assert call("uninstall") == (0, f"removed {file}\n")
    assert call("uninstall") == (0, f"there was no {file}\n")
    assert not file.exists()


def test_start_up_file_beside_the_finder_of_the_package(python, site_packages, fake_mmcv):
    (site_packages / command_line.FILE_NAME).write_text(command_line.LINE)
    (site_packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    code = "import sys, mmspectral, mmcv._ext\nprint(mmcv._ext.__spec__.origin)\n"
    code += "print([type(f).__name__ for f in sys.meta_path if f.find_spec('mmcv._ext', [])])"
    result = run(python, "-c", code, path=(fake_mmcv.parent, ROOT))
    finders = "['MmspectralCompat', 'TorchvisionExtensionFinder']"
    assert result.stdout.splitlines() == ["mmspectral.compat.torchvision_ops", finders], result.stderr


def test_python_works_after_mmspectral_is_gone(python, site_packages, fake_mmcv):
    (site_packages / command_line.FILE_NAME).write_text(command_line.LINE)
    code = "import json, mmcv\nprint('works')\nimport mmcv._ext"
    result = run(python, "-c", code, cwd=fake_mmcv.parent, PYTHONPATH=fake_mmcv.parent)
    # Python reports trouble with a start-up file on stderr before it runs the code.
    assert result.stdout.strip() == "works" and result.stderr.startswith("Traceback")
    assert result.stderr.strip().endswith("ModuleNotFoundError: No module named 'mmcv._ext'")


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / command_line.FILE_NAME
    monkeypatch.setattr(command_line, "start_up_file", lambda: place)
    assert command_line.main(["install"]) == 1
    assert capsys.readouterr().err.startswith(f"cannot install {place}: ")

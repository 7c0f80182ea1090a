"""Who serves ``mmcv._ext``: the finder yields to a compiled extension and hides no broken one."""

import importlib.util
import re
import sysconfig

import pytest
import torch
from mmengine.logging import HistoryBuffer

from mmspectral.compat import mmcv_ops
from tests.helpers import ROOT, run_python

REPORT = "from mmspectral.compat import mmcv_ops_backend\nprint(mmcv_ops_backend())\n"


@pytest.fixture
def stand_in():
    """The stand-in as a module of its own, so that it is tested beside a compiled extension too."""
    finder = mmcv_ops.TorchvisionExtensionFinder()
    spec = finder.find_spec("mmcv._ext", [])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_finder_is_installed_once_and_last_and_imports_nothing_heavy():
    # Without mmengine, which imports torch itself.
    result = run_python(
        "import sys\nsys.modules['mmengine'] = None\nimport mmspectral, mmspectral.compat.mmcv_ops as m\nm.install()\n"
        "print([i - len(sys.meta_path) for i, f in enumerate(sys.meta_path) if 'Torchvision' in type(f).__name__])\n"
        "print(sorted({'torch', 'torchvision', 'mmcv', 'mmspectral.compat.torchvision_ops'} & set(sys.modules)))"
    )
    assert result.stdout.split("\n")[:2] == ["[-1]", "[]"], result.stderr


def test_finder_serves_one_module(stand_in):
    finder = mmcv_ops.TorchvisionExtensionFinder()
    for name in ("mmcv", "mmcv.ops", "mmcv._extension", "_ext", "mmcv._ext.nms"):
        assert finder.find_spec(name, []) is None
    assert stand_in.__spec__.origin == "mmspectral.compat.torchvision_ops"
    assert stand_in.get_compiler_version() == stand_in.get_compiling_cuda_version()
    assert stand_in.get_compiler_version().startswith("not compiled"), "mmcv's environment report says so"


def test_the_stand_in_brings_mmengines_log_buffers_onto_torchs_allow_list(fake_mmcv, tmp_path):
    """mmdet's inferencer reads a checkpoint before it builds a model; the original mmengine does so without a list."""
    torch.save({"log": HistoryBuffer([1.0], [1])}, tmp_path / "epoch_1.pth")
    code = "import torch, mmspectral, mmcv._ext\nprint(torch.load('epoch_1.pth', weights_only=True)['log'].current())"
    result = run_python(code, path=(fake_mmcv.parent, ROOT), cwd=tmp_path)
    assert result.stdout.strip() == "1.0", result.stderr


@pytest.mark.parametrize(
    ("name", "content", "report"),
    [
        ("_ext.py", b"nms = 'compiled'", "compiled"),
        (f"_ext{sysconfig.get_config_var('EXT_SUFFIX')}", b"not a shared library", "broken: .*_ext"),
        ("_ext.py", b"raise RuntimeError('undefined symbol: _ZN2at')", "broken: undefined symbol: _ZN2at"),
        ("_ext.py", b"import libtorch_of_2021", "broken: No module named 'libtorch_of_2021'"),
        ("_ext.cpython-36m-x86_64-linux-gnu.so", b"", r"broken: \S*linux-gnu.so was built for .*remove the file"),
    ],
    ids=["whole", "no library", "fails while it loads", "lacks what it imports", "of another Python"],
)
def test_an_extension_that_is_there_is_used_and_not_masked(fake_mmcv, name, content, report):
    (fake_mmcv / name).write_bytes(content)
    result = run_python(f"{REPORT}import mmcv._ext\nprint(mmcv._ext.nms)", path=(fake_mmcv.parent, ROOT))
    assert re.match(report, result.stdout)
    assert result.stdout.endswith("\ncompiled\n") if report == "compiled" else "Error" in result.stderr


@pytest.mark.parametrize("missing", ["mmcv", "mmcv._ext"])
def test_without_mmcv_or_torchvision_the_ordinary_error(fake_mmcv, missing):
    folders = [fake_mmcv.parent, ROOT] if missing == "mmcv._ext" else [ROOT]
    # -S leaves out site-packages: neither mmcv nor torchvision is there.
    result = run_python(f"{REPORT}import mmcv._ext", "-S", path=folders)
    assert result.stderr.strip().endswith(f"ModuleNotFoundError: No module named {missing!r}")
    assert result.stdout.strip() == "missing"


def test_any_other_operator_raises_when_it_is_called_and_private_names_are_absent(stand_in):
    operator = stand_in.carafe_forward
    with pytest.raises(RuntimeError, match=r"'carafe_forward' is not available.*onedl-mmcv.*mim install mmcv"):
        operator(1, weight=2)
    assert not any(hasattr(stand_in, name) for name in ("__path__", "__wrapped__", "_ipython_display_"))

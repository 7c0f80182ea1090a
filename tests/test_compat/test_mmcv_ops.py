"""Who serves ``mmcv._ext``: the finder yields to a compiled extension and hides no broken one."""

import importlib.util
import re
import sysconfig

import pytest
import torch
from mmengine.logging import HistoryBuffer

from mmspectral.compat import mmcv_ops

REPORT = "from mmspectral.compat import mmcv_ops_backend\nprint(mmcv_ops_backend())"
# -S leaves out site-packages: neither mmcv nor torchvision is there.
BARE = ("-S", "-c")


@pytest.fixture
def stand_in():
    """The stand-in as a module of its own, so that it is tested beside a compiled extension too."""
    finder = mmcv_ops.TorchvisionExtensionFinder()
    spec = finder.find_spec("mmcv._ext", [])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_finder_is_installed_once_and_last_and_imports_nothing_heavy(fresh_process):
    # Without mmengine, which imports torch itself.
    result = fresh_process(
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


def test_the_stand_in_brings_mmengines_log_buffers_onto_torchs_allow_list(fresh_process, fake_mmcv, tmp_path):
    """mmdet's inferencer reads a checkpoint before it builds a model; the original mmengine does so without a list."""
    torch.save({"log": HistoryBuffer([1.0], [1])}, tmp_path / "epoch_1.pth")
    code = "import torch, mmspectral, mmcv._ext\nprint(torch.load('epoch_1.pth', weights_only=True)['log'].current())"
    result = fresh_process(code, fake_mmcv.parent)
    assert result.stdout.strip() == "1.0", result.stderr


@pytest.mark.parametrize(
    ("name", "content", "report"),
    [
        ("_ext.py", b"nms = 'compiled'", "compiled"),
        (f"_ext{sysconfig.get_config_var('EXT_SUFFIX')}", b"not a shared library", "broken: .*_ext"),
        ("_ext.py", b"raise RuntimeError('undefined symbol: _ZN2at')", "broken: undefined symbol: _ZN2at"),
        ("_ext.py", b"import libtorch_of_2021", "broken: No module named 'libtorch_of_2021'"),
    ],
    ids=["whole", "no library", "fails while it loads", "lacks what it imports"],
)
def test_an_extension_that_is_there_is_used_and_not_masked(fresh_process, fake_mmcv, name, content, report):
    (fake_mmcv / name).write_bytes(content)
    assert re.match(report, fresh_process(REPORT, fake_mmcv.parent).stdout)
    result = fresh_process("import mmspectral, mmcv._ext\nprint(mmcv._ext.nms)", fake_mmcv.parent)
    assert result.stdout.strip() == "compiled" if report == "compiled" else "Error" in result.stderr


def test_extension_of_another_python_is_not_masked(fresh_process, fake_mmcv):
    binary = fake_mmcv / "_ext.cpython-36m-x86_64-linux-gnu.so"
    binary.touch()
    report = fresh_process(REPORT, fake_mmcv.parent)
    assert report.stdout.startswith(f"broken: {binary} was built for another Python"), report.stderr
    finder = mmcv_ops.TorchvisionExtensionFinder()
    with pytest.raises(ImportError, match="remove the file"):
        finder.find_spec("mmcv._ext", [str(fake_mmcv)])
    binary.unlink()
    assert finder.find_spec("mmcv._ext", [str(fake_mmcv)]) is not None


@pytest.mark.parametrize("missing", ["mmcv", "mmcv._ext"])
def test_without_mmcv_or_torchvision_the_ordinary_error(fresh_process, fake_mmcv, missing):
    folders = [fake_mmcv.parent] if missing == "mmcv._ext" else []
    result = fresh_process("import mmspectral\nimport mmcv._ext", *folders, arguments=BARE)
    assert result.stderr.strip().endswith(f"ModuleNotFoundError: No module named {missing!r}")
    assert fresh_process(REPORT, *folders, arguments=BARE).stdout.strip() == "missing"


def test_any_other_operator_raises_when_it_is_called_and_private_names_are_absent(stand_in):
    operator = stand_in.carafe_forward
    with pytest.raises(RuntimeError, match=r"'carafe_forward' is not available.*onedl-mmcv.*mim install mmcv"):
        operator(1, weight=2)
    assert not any(hasattr(stand_in, name) for name in ("__path__", "__wrapped__", "_ipython_display_"))

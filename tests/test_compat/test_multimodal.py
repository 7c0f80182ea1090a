"""mmpretrain imports beside transformers 5, in whatever order and in processes that never import mmspectral."""

import pytest

from mmspectral.compat.__main__ import LINE
from mmspectral.compat.multimodal import SWITCH
from tests.helpers import ROOT, run_python


@pytest.fixture
def site(tmp_path):
    """Return a function that makes a folder with a stand-in for mmpretrain and the metadata of a transformers."""

    def make(version):
        package = tmp_path / "mmpretrain" / "utils"
        package.mkdir(parents=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        (package / "dependency.py").write_text("WITH_MULTIMODAL = True\n")
        metadata = tmp_path / f"transformers-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    "before", ["import mmspectral", LINE, f"{LINE}import mmspectral", f"import {SWITCH}, mmspectral"]
)
@pytest.mark.parametrize(("version", "kept"), [("4.57.1", True), ("5.24.0", False)])
def test_the_switch_is_off_beside_transformers_5(site, before, version, kept):
    code = f"{before}\nimport {SWITCH} as d\nprint(d.WITH_MULTIMODAL)"
    result = run_python(code, "-S", path=(site(version), ROOT))  # -S: without this environment's start-up file
    assert result.stdout.strip() == str(kept), result.stderr


def test_without_transformers_the_switch_is_left_alone():
    code = "import mmspectral.compat.multimodal as m\nprint(m.is_needed())"
    result = run_python(code, "-S", PYTHONPATH=ROOT)
    assert result.stdout.strip() == "False", result.stderr


def test_models_import_beside_transformers():
    pytest.importorskip("transformers")
    code = "import mmpretrain.models, mmspectral.models\nfrom mmpretrain.registry import MODELS\n"
    result = run_python(f"{LINE}{code}print(MODELS.get('Blip2VQA').__name__)", "-W", "ignore")
    assert result.stdout.strip(), result.stderr

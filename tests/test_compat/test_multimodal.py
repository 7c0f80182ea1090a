"""mmpretrain imports beside transformers 5, in whatever order and in processes that never import mmspectral."""

import pytest

from mmspectral.compat.__main__ import LINE
from mmspectral.compat.multimodal import SWITCH
from tests.helpers import ROOT, run_python


@pytest.mark.parametrize(
    "before", ["import mmspectral", LINE, f"{LINE}import mmspectral", f"import {SWITCH}, mmspectral"]
)
@pytest.mark.parametrize(("version", "kept"), [(None, True), ("4.57.1", True), ("5.24.0", False)])
def test_the_switch_is_off_beside_transformers_5(tmp_path, before, version, kept):
    package = tmp_path / "mmpretrain" / "utils"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "dependency.py").write_text("WITH_MULTIMODAL = True\n")
    if version is not None:
        metadata = tmp_path / f"transformers-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    code = f"{before}\nimport {SWITCH} as d\nprint(d.WITH_MULTIMODAL)"
    result = run_python(code, "-S", path=(tmp_path, ROOT))  # -S: without this environment's start-up file
    assert result.stdout.strip() == str(kept), result.stderr


def test_models_import_beside_transformers():
    pytest.importorskip("transformers")
    code = "import mmpretrain.models, mmspectral.models\nfrom mmpretrain.registry import MODELS\n"
    result = run_python(f"{LINE}{code}print(MODELS.get('Blip2VQA').__name__)", "-W", "ignore")
    assert result.stdout.strip(), result.stderr

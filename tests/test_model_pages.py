"""metafile.yml, README and configs of each family say the same."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "misc" / "generate_model_pages.py"
FAMILIES = ("davit", "deit", "swin", "vit", "xcit")

_spec = importlib.util.spec_from_file_location("generate_model_pages", TOOL)
generator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generator)


def test_pages_are_up_to_date():
    pages = generator.pages(ROOT)
    assert {path.parent.name for path in pages} == set(FAMILIES)
    stale = [str(path.relative_to(ROOT)) for path, text in pages.items() if path.read_text() != text]
    assert not stale, "run python tools/misc/generate_model_pages.py"


def test_index_imports_every_metafile():
    index = yaml.safe_load((ROOT / "configs" / "model-index.yml").read_text())
    assert index["Import"] == sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").glob("*/metafile.yml"))


def test_metafiles_list_every_config_once():
    models = [model for metafile in generator.read_metafiles(ROOT) for model in metafile["Models"]]
    configs = [str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*.py")]
    configs = [c for c in configs if not {"_base_", "examples"} & set(Path(c).parts)]
    assert sorted(model["Config"] for model in models) == sorted(configs)
    assert all(Path(model["Config"]).stem == model["Name"] for model in models)


def test_every_collection_has_its_readme_and_its_models():
    for metafile in generator.read_metafiles(ROOT):
        (collection,) = metafile["Collections"]
        assert {model["In Collection"] for model in metafile["Models"]} == {collection["Name"]}
        folder = Path(collection["README"]).parent
        assert (ROOT / collection["README"]).is_file()
        assert {Path(model["Config"]).parent for model in metafile["Models"]} == {folder}


def test_families_show_every_conditioned_config_with_its_place_of_training():
    """A page never leaves open whether a figure is this project's."""
    for family in FAMILIES:
        text = (ROOT / "configs" / family / "README.md").read_text()
        assert "None of these configs was trained here" in text
        for path in (ROOT / "configs" / family).glob("*spectral-*.py"):
            rows = [line for line in text.splitlines() if line.startswith(f"| [`{path.stem}`]")]
            assert len(rows) == 1, path
            assert all(row.endswith(f"| {generator.NOT_TRAINED} |") for row in rows)


def test_stale_page_is_found_and_written_once(tmp_path):
    (tmp_path / "tools" / "misc").mkdir(parents=True)
    tool = shutil.copy(TOOL, tmp_path / "tools" / "misc")
    shutil.copytree(ROOT / "configs", tmp_path / "configs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    readme = tmp_path / "configs" / "swin" / "README.md"
    right = readme.read_text()
    readme.write_text(right.replace("| 81.2 |", "| 99.9 |"))

    def run(*arguments):
        return subprocess.run([sys.executable, tool, *arguments], capture_output=True, text=True, timeout=60)

    stale = run("--check")
    assert (stale.returncode, stale.stdout) == (1, "out of date: configs/swin/README.md\n")
    assert "Run python tools/misc/generate_model_pages.py" in stale.stderr
    assert "99.9" in readme.read_text()
    assert run().stdout == "written: configs/swin/README.md\n"
    assert readme.read_text() == right
    again = run()
    assert (again.returncode, again.stdout) == (0, "")

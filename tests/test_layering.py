"""The floors of the package: an import may only go down, and no modules import each other in a circle."""

import ast
import graphlib
from pathlib import Path

import pytest

from tests.helpers import ROOT, TOOLS, run_python

PACKAGE = ROOT / "mmspectral"
# From the ground up. What stands on one floor does not know its neighbours there.
FLOORS = (
    ("errors", "lazy", "version", "registry"),
    ("compat", "configs_path"),
    ("arguments",),
    ("ops",),
    ("layers",),
    ("checkpoints",),
    ("models",),
    ("analysis", "datasets"),
    ("evaluation",),
    ("engine",),
    ("apis",),
)
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
FILES = sorted(PACKAGE.rglob("*.py"))
OPENMMLAB = ("mmengine", "mmcv", "mmdet", "mmpretrain", "torchvision", "cv2")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def public_names():
    """Yield ``package.name`` for what each package lists in ``__all__``; one of its modules may have the same name."""
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = [leaf.value for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)]
                yield from (f"{name_of(path)}.{name}" for name in names)


PUBLIC = set(public_names())


def imported(tree: ast.AST, lazy: bool):
    """Yield the modules that code imports; with ``lazy``, also those that its functions and its annotations import."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ({name if name in MODULES - PUBLIC else node.module for name in names})
        later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        later |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if lazy or not later:
            nodes.extend(ast.iter_child_nodes(node))


def test_every_part_has_its_floor():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert parts - {"__init__"} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    modules = set(imported(ast.parse(path.read_text()), lazy=True))
    above = {
        module
        for module in modules
        if module.startswith("mmspectral.")
        and (there := module.split(".")[1]) != here
        and LEVEL[there] >= LEVEL.get(here, len(FLOORS))
    }
    assert not above
    if here in ("ops", "layers"):
        assert not {module for module in modules if module.partition(".")[0] in OPENMMLAB}


def test_no_modules_import_each_other_in_a_circle():
    graph = {name_of(path): set(imported(ast.parse(path.read_text()), lazy=False)) & MODULES for path in FILES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("path", sorted(TOOLS.rglob("*.py")), ids=lambda path: str(path.relative_to(TOOLS)))
def test_tools_import_public_names_only(path):
    modules = set(imported(ast.parse(path.read_text()), lazy=True))
    assert not {module for module in modules if module.startswith("mmspectral.") and module.count(".") > 1}


def test_ops_and_layers_need_only_torch():
    result = run_python(
        f"import importlib.util, sys\nhidden = {OPENMMLAB}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in hidden:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name.split('.')[0] in hidden else find(name, *a)\n"
        "import torch, mmspectral.layers as L\n"
        "from mmspectral.ops import ProjectionLayout\n"
        "layout = ProjectionLayout(('q', 'k', 'v'), 2)\n"
        "linear = L.ConditionedLinear(torch.nn.Linear(6, 18), L.IdentityCorrection(), layout)\n"
        "linear(torch.ones(2, 6)).sum().backward()\n"
        "print('works')\n"
    )
    assert result.stdout.strip() == "works", result.stderr


def test_importing_the_package_is_light():
    heavy = ("mmdet", "mmpretrain", "mmcv", "cv2", "matplotlib", "torchvision")
    result = run_python(f"import sys, mmspectral\nprint([m for m in {heavy} if m in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr

"""Our names build under any scope, in any import order, and shadow nobody's."""

import mmengine.registry
import pytest
from mmengine.registry import Registry

import mmspectral.registry
from tests.helpers import run_python

BUILD = """
from mmengine.registry import MODELS, DefaultScope, init_default_scope
{before}
model = MODELS.build(dict(type='mmspectral.SpectralXCiT', arch=dict(embed_dims=16, depth=1, num_heads=2), patch_size=8,
                          conditioning=dict(type='IdentityCorrection', scale=1.0)))
layer = MODELS.build(dict(type='mmspectral.SpectralXCA', dim=8, num_heads=2))
neck = MODELS.build(dict(type='mmspectral.Feature2Pyramid', in_channels=8))
print(type(model).__name__, type(layer).__name__, type(neck).__name__)
"""
IMPORTS = "from mmengine.utils import import_modules_from_strings as i; i(['mmdet.models', 'collections'])"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "init_default_scope('mmdet')",
        "init_default_scope('mmpretrain')",
        f"init_default_scope('mmdet'); {IMPORTS}",
    ],
    ids=["no scope", "mmdet", "mmpretrain", "custom imports"],
)
def test_builds_in_a_fresh_process_without_importing_us(before):
    result = run_python(BUILD.format(before=before), "-W", "ignore")
    assert result.stdout.splitlines()[-1:] == ["SpectralXCiT SpectralXCA Feature2Pyramid"], result.stderr


@pytest.mark.parametrize("first", ["mmdet", "mmpretrain", "mmspectral"])
def test_any_package_may_be_imported_first(first):
    others = [name for name in ("mmpretrain", "mmspectral", "mmdet") if name != first]
    code = "import mmspectral\n" + "".join(f"import {name}.models\n" for name in (first, *others)) + "print('fine')"
    result = run_python(code, "-W", "ignore")
    assert result.stdout.splitlines()[-1:] == ["fine"], result.stderr


def test_every_root_registry_has_our_child_with_a_location():
    roots = {name: value for name, value in vars(mmengine.registry).items() if isinstance(value, Registry)}
    assert len(roots) > 20
    for name, root in roots.items():
        ours = getattr(mmspectral.registry, name)
        assert ours.scope == "mmspectral" and ours.parent is root
        ours.import_from_location()


def test_no_name_is_anybody_elses():
    import mmdet.models  # noqa: F401
    import mmpretrain.models  # noqa: F401
    from mmengine.registry import MODELS

    mmspectral.registry.MODELS.import_from_location()
    for name in mmspectral.registry.MODELS.module_dict:
        assert name not in MODELS.module_dict
        assert name not in MODELS.children["mmdet"].module_dict
        assert name not in MODELS.children["mmpretrain"].module_dict

"""DarkCalibrationHook in real runs: when it calibrates, what training sees of it, averaged models, ranks."""

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import MODELS, DefaultScope

from mmspectral.engine import launch_run
from mmspectral.engine.hooks import DarkCalibrationHook
from mmspectral.engine.hooks.feature_redraw_hook import averaged_models
from mmspectral.layers import feature_kernels
from tests.helpers import DATA, ROOT, TOY, tool_output

DARK = dict(type="dark", num_features=12, proposal="sharp", shift="learned")
CALIBRATION = dict(type="mmspectral.DarkCalibrationHook", num_batches=2, batch_size=2, fit_steps=2)
MMENGINE_EMA = [dict(type="mmengine.EMAHook", momentum=0.3, update_buffers=buffers) for buffers in (False, True)]
MMPRETRAIN_EMA = dict(type="mmpretrain.EMAHook", momentum=0.3)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.syspath_prepend(TOY)


class Watch(Hook):
    """Write down the kernels of model and averages as training starts, and the images of each batch."""

    priority = "LOWEST"

    def before_train(self, runner):
        models = (runner.model, *averaged_models(runner))
        self.kernels = [
            {
                f"{name}.{key}": tensor.clone()
                for name, kernel in feature_kernels(model).items()
                for key, tensor in kernel.state_dict().items()
            }
            for model in models
        ]
        self.images = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.images.append(torch.stack(data_batch["inputs"]))


def config(work_dir, *hooks, kernel=DARK, load_from=None, **backbone):
    cfg = Config.fromfile(TOY / "config.py")
    cfg.model.backbone.update(type="mmspectral.DarkViT", kernel=kernel, patch_size=8, **backbone)
    cfg.update(work_dir=str(work_dir), launcher="none", custom_hooks=list(hooks), load_from=load_from)
    return cfg


def train(cfg):
    """Train; return what was seen and the warnings and tables that were logged."""
    watch, logged = Watch(), []

    def run(runner):
        runner.register_hook(watch)
        for level in ("info", "warning"):
            setattr(runner.logger, level, logged.append)
        runner.train()

    launch_run(cfg, run)
    return watch, [text for text in logged if "DarkCalibrationHook" in text]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A checkpoint of the softmax twin, with attention far from uniform."""
    path = tmp_path_factory.mktemp("pretrained") / "softmax.pth"
    with pytest.MonkeyPatch.context() as patch_path, DefaultScope.overwrite_default_scope("mmpretrain"):
        patch_path.syspath_prepend(TOY)
        torch.manual_seed(0)
        model = MODELS.build(config(path, kernel=None).model)
        for layer in model.backbone.layers:
            layer.attn.qkv.weight.data.mul_(torch.linspace(6, 0.5, 16))
    torch.save(dict(state_dict=model.state_dict()), path)
    return str(path)


def test_calibrates_loaded_weights_and_leaves_the_data_of_training_alone(pretrained, tmp_path):
    cfg = config(tmp_path / "with", CALIBRATION, load_from=pretrained)
    watch, logged = train(cfg)
    assert len(logged) == 1 and "| backbone.layers.0.attn.kernel | 12 | " in logged[0]
    M = next(t for name, t in watch.kernels[0].items() if name.endswith("M"))
    assert not torch.allclose(M, torch.eye(8).expand(2, 8, 8), atol=0.1)
    plain, nothing = train(config(tmp_path / "without", load_from=pretrained))
    assert nothing == [] and len(plain.images) == 2
    assert all(torch.equal(a, b) for a, b in zip(watch.images, plain.images, strict=True))

    cfg = config(tmp_path / "resumed", CALIBRATION, load_from=str(tmp_path / "with" / "iter_2.pth"))
    cfg.resume = True
    cfg.train_cfg.max_iters = 4
    watch, logged = train(cfg)
    trained = torch.load(tmp_path / "with" / "iter_2.pth", weights_only=False)["state_dict"]
    assert logged == [] and len(watch.images) == 2
    assert torch.equal(next(iter(watch.kernels[0].values())), trained["backbone.layers.0.attn.kernel.M"])


def test_averaged_models_get_the_result(pretrained, tmp_path):
    watch, _ = train(config(tmp_path, CALIBRATION, *MMENGINE_EMA, load_from=pretrained))
    own, *averages = watch.kernels
    assert len(own) == 6 and len(averages) == 2
    for averaged in averages:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(own.values(), averaged.values(), strict=True))


def test_mmpretrains_ema_hook_comes_first(pretrained, tmp_path):
    """It puts the averaged weights of a loaded run into the model when training begins: those are calibrated."""
    train(config(tmp_path / "first", MMPRETRAIN_EMA, load_from=pretrained))
    averaged_weights = str(tmp_path / "first" / "iter_2.pth")
    watch, _ = train(config(tmp_path / "second", CALIBRATION, MMPRETRAIN_EMA, load_from=averaged_weights))
    plain, _ = train(config(tmp_path / "third", CALIBRATION, load_from=averaged_weights))
    for own, averaged, expected in zip(*(k.values() for k in (*watch.kernels, *plain.kernels)), strict=True):
        assert torch.equal(own, averaged) and torch.equal(own, expected)


def test_random_weights_and_a_twin_without_kernel_are_warned_of(pretrained, tmp_path):
    _, logged = train(config(tmp_path / "random", CALIBRATION))
    assert "the weights are random" in logged[0] and len(logged) == 2
    init_cfg = dict(type="Pretrained", checkpoint=pretrained, prefix="backbone.")
    _, logged = train(config(tmp_path / "init_cfg", CALIBRATION, init_cfg=init_cfg))
    assert len(logged) == 1
    watch, logged = train(config(tmp_path / "twin", CALIBRATION, kernel=None, load_from=pretrained))
    assert "no attention of the model has an M" in logged[0] and len(watch.images) == 2


@pytest.mark.parametrize("wrong", [dict(num_batches=0), dict(batch_size=1.5), dict(num_tokens=1), dict(fit_steps=-1)])
def test_a_number_out_of_range_is_named(wrong):
    with pytest.raises(ValueError, match=f"DarkCalibrationHook: {next(iter(wrong))} must be "):
        DarkCalibrationHook(**wrong)


@pytest.mark.slow
def test_two_ranks_end_with_one_geometry_and_the_same_draws(pretrained, tmp_path):
    redraw = dict(type="mmspectral.FeatureRedrawHook", interval=1)
    cfg = config(tmp_path, dict(type="WriteKernels"), CALIBRATION, redraw, load_from=pretrained)
    cfg.custom_imports.imports.append("ranks")
    cfg.dump(tmp_path / "config.py")
    options = ("--launcher", "pytorch", "--work-dir", tmp_path)
    tool_output("train.py", tmp_path / "config.py", *options, ranks=2, path=[ROOT, TOY, DATA / "ranks"])
    first, second = (torch.load(tmp_path / f"kernels{rank}.pth", weights_only=True) for rank in (0, 1))
    assert first.keys() == second.keys() and len(first) == 6
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert first["backbone.layers.0.attn.kernel.redraws"] == 1
    assert not torch.allclose(first["backbone.layers.0.attn.kernel.M"], torch.eye(8).expand(2, 8, 8), atol=0.1)

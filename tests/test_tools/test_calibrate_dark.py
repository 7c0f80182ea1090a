"""tools/analysis_tools/calibrate_dark.py: a softmax checkpoint becomes a calibrated one, or an error says why not."""

import copy
import csv

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner

from mmspectral.analysis import calibrate_checkpoint, calibration_batches, checkpoint_inputs, see
from mmspectral.errors import UsageError
from mmspectral.layers import feature_kernels
from mmspectral.ops.random_features import draw_projection
from tests.helpers import CONFIGS, TOY

SHAPES = CONFIGS / "dark" / "mask-rcnn_dark-vit-d128-p8_fpn_shapes.py"
DARK = dict(type="dark", num_features=12, proposal="sharp", shift="fixed", seed=5)


@pytest.fixture(autouse=True)
def toy_model(monkeypatch, loaders):
    monkeypatch.syspath_prepend(TOY)


def config(kernel=DARK):
    cfg = Config.fromfile(TOY / "config.py")
    cfg.model.backbone.update(type="mmspectral.DarkViT", kernel=kernel, patch_size=8)
    return cfg


def build(cfg):
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        torch.manual_seed(0)
        return MODELS.build(cfg.model)


@pytest.fixture
def softmax(tmp_path):
    """A checkpoint of the softmax twin."""
    path = tmp_path / "softmax.pth"
    torch.save(dict(state_dict=build(config(None)).state_dict(), meta=dict(epoch=7)), path)
    return path


TOOL = "analysis_tools/calibrate_dark.py"
FEW = ["--batches", 2, "--batch-size", 2, "--steps", 2]


def test_command_line(call_tool, softmax, tmp_path):
    config().dump(tmp_path / "config.py")
    arguments = [tmp_path / "config.py", softmax, tmp_path / "dark.pth", *FEW]
    status, out, errors = call_tool(TOOL, *arguments, "--csv", tmp_path / "rows.csv")
    assert status == 0, errors
    assert "| backbone.layers.0.attn.kernel | 12 | " in out and out.endswith(f"{tmp_path / 'dark.pth'}\n")
    (row,) = csv.DictReader((tmp_path / "rows.csv").open())
    assert float(row["error_after"]) < float(row["error_before"])

    written, given = (torch.load(tmp_path / f"{name}.pth", weights_only=True) for name in ("dark", "softmax"))
    assert written["meta"] == dict(epoch=7)
    model = build(config())
    model.load_state_dict(written["state_dict"], strict=True)
    (kernel,) = feature_kernels(model).values()
    assert not torch.equal(kernel.M[0], torch.eye(8)) and (kernel.proposal_variance > 1).all()
    assert torch.equal(kernel.w, draw_projection(12, 8, 5, 0))
    assert all(torch.equal(tensor, written["state_dict"][name]) for name, tensor in given["state_dict"].items())

    cfg = config()
    cfg.model.backbone.init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "dark.pth"), prefix="backbone.")
    by_init_cfg = build(cfg)
    by_init_cfg.init_weights()
    assert torch.equal(feature_kernels(by_init_cfg)["backbone.layers.0.attn.kernel"].M, kernel.M)

    status, _, errors = call_tool(TOOL, *arguments)
    assert status == 2 and "dark.pth is there already; choose another name or pass --force" in errors
    status, out, errors = call_tool(TOOL, *arguments, "--force", "--features", 6, "--data", "val")
    assert status == 0 and "| backbone.layers.0.attn.kernel | 6 | " in out, errors
    assert torch.load(tmp_path / "dark.pth", weights_only=True)["state_dict"][
        "backbone.layers.0.attn.kernel.w"
    ].shape == (6, 8)


def test_a_detector_and_a_file_of_a_backbone_alone(tmp_path):
    """The head, which the file lacks, is random, and does not get into the result."""
    cfg = Config.fromfile(SHAPES)
    cfg.train_dataloader.dataset.num_images = 4
    twin = copy.deepcopy(cfg)
    twin.model.backbone.kernel = None
    torch.save(build(twin).backbone.state_dict(), tmp_path / "backbone.pth")
    target = tmp_path / "dark.safetensors"
    rows = calibrate_checkpoint(
        cfg, str(tmp_path / "backbone.pth"), target, num_batches=1, batch_size=2, num_tokens=32, fit=None
    )
    assert [row.layer for row in rows] == list(feature_kernels(build(cfg)))
    backbone = build(cfg).backbone
    backbone.init_cfg = dict(type="Pretrained", checkpoint=str(target))
    backbone.init_weights()
    for kernel in feature_kernels(backbone).values():
        assert not torch.equal(kernel.M[0], torch.eye(kernel.head_dim))
    from safetensors import safe_open

    with safe_open(target, framework="pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} == {"backbone"}  # noqa: SIM118


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (dict(kernel=None), {}, "no attention over random features that can be calibrated"),
        (dict(kernel=None), dict(num_features=8), "model.backbone has no kernel"),
        (dict(indices=0), {}, "train_dataloader cannot be built; has its data set any image"),
        ({}, dict(part="val"), "no val_dataloader"),
    ],
)
def test_what_is_wrong_is_said(change, options, message, softmax, tmp_path):
    cfg = config(change.get("kernel", DARK))
    cfg.val_dataloader = None
    cfg.train_dataloader.dataset.indices = change.get("indices")
    with pytest.raises(UsageError, match=message):
        calibrate_checkpoint(cfg, str(softmax), tmp_path / "dark.pth", fit=None, **options)
    assert not (tmp_path / "dark.pth").exists()


def test_inputs_of_a_checkpoint_are_those_of_its_softmax_attention(softmax):
    (found,) = checkpoint_inputs(config(), str(softmax), num_batches=3, batch_size=1, num_tokens=1000).values()
    model, seen = build(config(None)).eval(), []
    model.load_state_dict(torch.load(softmax, weights_only=True)["state_dict"])
    model.backbone.layers[0].attn.qkv.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    with DefaultScope.overwrite_default_scope(config().default_scope):
        loader = Runner.build_dataloader(config().train_dataloader, seed=0)
    for batch in calibration_batches(loader, 3, 1, seed=0):
        see(model, batch)
    mine = torch.cat([t.sum(2).flatten(1) for t in found], dim=1)  # tokens are in another order
    torch.testing.assert_close(mine, torch.cat(seen).sum(1))


def test_errors_on_the_queries_and_keys_of_a_checkpoint(call_tool, softmax, tmp_path):
    config().dump(tmp_path / "dark.py")
    out = tmp_path / "errors.csv"
    options = ["--images", 4, "--features", 8, "--seeds", 2, "--estimators", "performer", "uniform", "--out", out]
    call_tool("analysis_tools/attention_error.py", "--checkpoint", tmp_path / "dark.py", softmax, *options)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["data"], row["estimator"]) for row in rows] == [("dark", "performer"), ("dark", "uniform")]
    assert all(float(row["error_softmax"]) > 0 for row in rows)

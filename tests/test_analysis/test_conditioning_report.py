"""The conditioning report: its numbers, its verdict, its page, and the page in a real browser."""

import dataclasses
import json
import math
import re
import runpy
import shutil
import subprocess
import sys

import cv2
import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

from mmspectral.analysis import (
    JacobianSettings,
    Subject,
    build_model,
    collect_report,
    head_jacobian,
    kappa_history,
    measure,
    render_report,
    stock_twin,
    training_curves,
    verdict,
    xca_temperature,
)
from mmspectral.analysis.conditioning_report import RunLog
from mmspectral.analysis.report_page import format_number
from mmspectral.errors import UsageError
from mmspectral.layers import probe_tokens, saturation
from mmspectral.models import SpectralXCA
from tests.helpers import TOOLS, TOY

SCRIPT = TOOLS / "analysis_tools" / "conditioning_report.py"
CONDITIONING = dict(type="IdentityCorrection", scale=10.0)


def config(**backbone):
    arch = dict(embed_dims=24, depth=2, num_heads=2)
    settings = dict(type="mmspectral.SpectralXCiT", arch=arch, patch_size=8, conditioning=CONDITIONING)
    head = dict(type="LinearClsHead", num_classes=2, in_channels=24)
    model = dict(type="ImageClassifier", backbone=settings | backbone, head=head)
    return Config(dict(default_scope="mmpretrain", model=model))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two iterations that logs condition numbers: its config and its folder."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "conditioned.py"
    path.write_text(
        f"_base_ = {str(TOY / 'config.py')!r}\n"
        "model = dict(\n"
        f"    backbone=dict(_delete_=True, **{config().model.backbone.to_dict()!r}),\n"
        f"    head=dict(_delete_=True, **{config().model.head.to_dict()!r}),\n"
        ")\n"
        "custom_hooks = [dict(type='mmspectral.ConditioningHook', interval=1)]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOY)
        cfg = Config.fromfile(path)
    cfg.work_dir = str(folder / "work")
    Runner.from_cfg(cfg).train()
    return path, folder / "work"


@pytest.fixture(scope="module")
def report(run, run_command):
    """The report that the command line writes for that run."""
    path, work_dir = run
    output = run_command(sys.executable, SCRIPT, path, work_dir / "iter_2.pth", path=[TOY])
    file = work_dir / "conditioning_report.html"
    assert str(file) in output.splitlines()
    return file


def test_saturation_is_that_of_each_layer_on_the_probe_tokens_of_its_width():
    model = build_model(config(), seed=0)
    found = measure(model, "start", {}).saturations
    assert [rho for _, rho in found] == [0.0, 0.5, 0.9] * 2
    layer = model.backbone.xca_layers[1].attn
    with torch.no_grad():
        logits = layer.attention_logits(probe_tokens(model.backbone.probe_length, 24, 0.9))
    assert found["backbone.xca_layers.1.attn", 0.9] == saturation(logits)


def test_twin_differs_by_conditioning_alone():
    cfg = config(class_attention_conditioning=CONDITIONING)
    twin = stock_twin(cfg)
    assert cfg.model.backbone.conditioning == CONDITIONING
    assert twin.model.backbone.conditioning is None and twin.model.backbone.class_attention_conditioning is None
    twin.model.backbone.update(conditioning=CONDITIONING, class_attention_conditioning=CONDITIONING)
    assert twin.model == cfg.model


def test_jacobian_of_the_layer_is_that_of_autograd_through_the_layer():
    """One head, no bias, an identity for the output projection: the layer is its head."""
    torch.manual_seed(0)
    layer = SpectralXCA(10, num_heads=1, conditioning=CONDITIONING).double()
    torch.nn.init.eye_(layer.proj.weight)
    torch.nn.init.zeros_(layer.proj.bias)
    settings = JacobianSettings("attn", num_tokens=5, head_dims=10, correlation=0.5)
    tokens = probe_tokens(5, 10, 0.5).double()

    def output(weight):
        return torch.func.functional_call(layer, {"qkv.weight": weight}, tokens).flatten()

    J = torch.autograd.functional.jacobian(output, layer.qkv.weight.detach()).flatten(1)
    heads = dict(zip("qkv", layer.qkv.effective_weight().detach().view(3, 10, 10), strict=True))
    found = head_jacobian(heads, settings, xca_temperature(layer))
    sigma = torch.linalg.svdvals(J)
    rank = int((sigma > max(J.shape) * torch.finfo(J.dtype).eps * sigma[0]).sum())
    assert found.cross_covariance.rank == rank
    assert found.cross_covariance.kappa == pytest.approx((sigma[0] / sigma[rank - 1]).item(), rel=1e-6)


def test_jacobian_takes_the_first_dimensions_and_needs_all_three_roles():
    heads = {role: torch.randn(12, 24, generator=torch.Generator().manual_seed(i)) for i, role in enumerate("qkv")}
    cut = head_jacobian(heads, JacobianSettings("attn", num_tokens=4, head_dims=5))
    assert cut == head_jacobian({role: m[:5] for role, m in heads.items()}, JacobianSettings("attn", 4, 16))
    assert cut.dims == 5 and cut.condition.full_rank == 4 * 5 and cut.cross_covariance is None
    with pytest.raises(ValueError, match="needs its q, k and v weights; conditioned are q, k"):
        head_jacobian({role: heads[role] for role in "qk"}, JacobianSettings("attn"))


def write_log(folder, *records, torn=""):
    path = folder / "vis_data" / "scalars.json"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([*map(json.dumps, records), torn]))


def test_history_takes_the_worst_layer_and_joins_the_logs_of_a_resumed_run(tmp_path):
    def kappas(layer, **values):
        return {f"conditioning/b.{layer}.qkv/q/kappa_{kind}": value for kind, value in values.items()}

    # Layer 1 has no correction, layer 2 is rank-deficient without it.
    second = kappas(0, before=7.0, after=3.0) | kappas(1, before=9.0, after=9.0) | kappas(2, after=4.0)
    steps = {0: kappas(0, before=5.0, after=2.0), 2: second, 4: kappas(0, before=1.0), 5: {}}
    write_log(tmp_path / "20260101", *(dict(values, step=step) for step, values in steps.items()))
    resumed = (dict(kappas(0, before=8.0, after=2.5), step=4), dict(kappas(0, before=6.0, after=1.5), step=8))
    write_log(tmp_path / "20260102", *resumed, torn='{"step": 9, "lo')
    assert kappa_history(tmp_path) == {
        "q, W": [(0, 5.0), (2, 9.0), (4, 8.0), (8, 6.0)],
        "q, W + C": [(0, 2.0), (2, 4.0), (4, 2.5), (8, 1.5)],
    }
    assert kappa_history(tmp_path / "20260101") == {}


def test_curves_of_training_are_loss_gradients_and_metrics(tmp_path):
    gradients = {f"conditioning/a/{role}/grad_norm": value for role, value in zip("qkv", (1.0, 5.0, 3.0), strict=True)}
    stock = {"conditioning/a.v/v/kappa_before": 2.0, "conditioning/a.v/v/kappa_after": 2.0}
    lines = [dict(loss=2.0, loss_cls=1.0, step=50), dict(gradients, **stock, step=100)]
    lines += [{"coco/bbox_mAP": 0.25, "coco/bbox_mAP_50": 0.5, "step": 1}]
    write_log(tmp_path / "1", *lines)
    assert training_curves(tmp_path) == {
        "loss": [(50, 2.0)],
        "gradient norm": [(100, 3.0)],
        "coco/bbox_mAP": [(1, 0.25)],
    }
    assert kappa_history(tmp_path) == {"v, W": [(100, 2.0)]}, "a stock run has one curve for each role"


def test_numbers_have_three_digits():
    values = (0.0, 0.9999, 0.01234, 45.678, 789.4, 12345.0, 123456.0, -2e-5)
    texts = ["0.00", "1.00", "0.0123", "45.7", "789", "12,300", "1.23 × 10⁵", "-2.00 × 10⁻⁵"]
    assert [*map(format_number, values)] == texts
    assert [*map(format_number, (math.inf, math.nan, None))] == ["rank-deficient", "not finite", "–"]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "_a $x_1$ & b$"])
def test_names_are_text_and_neither_markup_nor_formulas(name, tmp_path):
    data = collect_report(Subject(name, config()))
    state = dataclasses.replace(data.states[0], label=name)
    log = RunLog(tmp_path, {name: [(1, 0.5)], "loss": [(1, 0.5)]}, {})
    page = render_report(dataclasses.replace(data, states=[state, *data.states[1:]], logs={name: log}))
    assert "<script" not in page and name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in page
    assert "Jacobian and its bound" not in page


def grades(data, **changes):
    return {f.topic.split()[0]: f.grade for f in verdict(dataclasses.replace(data, **changes))}


def test_the_verdict_says_what_is_good_and_what_is_not(tmp_path):
    data = collect_report(Subject("a.py", config()))
    untrained = dict(Condition="good", Entropy="good", Gradient="unknown", Training="unknown", AP="unknown")
    assert grades(data) == untrained

    def log(loss, AP, gradient):
        return RunLog(tmp_path, {"loss": [(1, loss)], "coco/bbox_mAP": [(1, AP)], "gradient norm": [(1, gradient)]}, {})

    logs = {"conditioned": log(1.0, 0.5, 1.0), "stock twin": log(2.0, 0.4, 2.0)}
    trained = dict(Condition="good", Entropy="good", Gradient="even", Training="good", box="good")
    assert grades(data, logs=logs) == trained
    worse = {"conditioned": log(2.0, 0.4, 9.0), "stock twin": log(1.0, 0.402, 1.0)}
    assert grades(data, logs=worse) == dict(
        Condition="good", Entropy="good", Gradient="bad", Training="bad", box="even"
    )
    page = render_report(dataclasses.replace(data, logs=logs))
    assert "box AP higher (0.500 / 0.400)" in page
    swapped = [dataclasses.replace(state, stock=not state.stock) for state in reversed(data.states)]
    assert grades(data, states=swapped)["Condition"] == "unknown", "a model without corrections"


def test_one_hot_attention_is_not_good():
    arch = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
    backbone = dict(type="mmspectral.SpectralViT", arch=arch, img_size=32, patch_size=8, conditioning=CONDITIONING)
    cfg = Config(dict(default_scope="mmpretrain", model=backbone))
    with pytest.warns(UserWarning, match="nearly one-hot"):
        data = collect_report(Subject("vit.py", cfg))
    assert grades(data)["Entropy"] == "bad" and "but: attention is nearly one-hot" in render_report(data)


def test_what_does_not_fit_is_named(tmp_path):
    subject = Subject("a.py", config())
    with pytest.raises(UsageError, match=r"'neck'; choose one of backbone.xca_layers.0.attn, backbone.xca_layers.1"):
        collect_report(subject, jacobian=JacobianSettings("neck"))
    other = Subject("b.py", config(arch=dict(embed_dims=24, depth=1, num_heads=2), conditioning=None))
    with pytest.raises(UsageError, match=r"no attention projection backbone.xca_layers.1.attn.qkv; a twin must be"):
        collect_report(subject, other)
    torch.save(dict(state_dict={"fc.weight": torch.zeros(3)}), tmp_path / "foreign.pth")
    with pytest.raises(UsageError, match="matched 0 of"):
        collect_report(Subject("a.py", config(), [str(tmp_path / "foreign.pth")]))
    pretrained = config(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "none.pth")))
    with pytest.raises(UsageError, match="initial weights of a.py cannot be read.*init_cfg=None"):
        collect_report(Subject("a.py", pretrained))


def test_trained_twin_is_measured_with_its_own_weights(tmp_path):
    cfg = config()
    model = build_model(stock_twin(cfg), seed=1)
    with torch.no_grad():
        model.backbone.xca_layers[0].attn.qkv.weight.copy_(torch.eye(24).repeat(3, 1))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        torch.save(dict(state_dict=model.state_dict()), tmp_path / folder / "epoch_1.pth")
    checkpoints = [str(tmp_path / folder / "epoch_1.pth") for folder in ("a", "b")]
    data = collect_report(Subject("a.py", cfg), Subject("b.py", stock_twin(cfg), checkpoints))
    labels = ["initialisation", "stock twin, initialisation", *(f"stock twin, {name}" for name in checkpoints)]
    assert [state.label for state in data.states] == labels
    initial, trained = (state.spectra[0].kappa_without for state in data.states[1:3])
    assert trained == pytest.approx(1) and initial > 2
    assert [(name, log.folder) for name, log in data.logs.items()] == [("stock twin", tmp_path / "b")]


def test_page_refers_to_nothing_outside_itself(report):
    text = report.read_text()
    assert len(re.findall("<h2>.+</h2>", text)) == 7
    references = re.findall(r'(?:src|href|srcset)="([^"]*)"', text)
    assert all(re.match(r"data:image/svg\+xml;base64,|data:,$", reference) for reference in references)
    assert "default-src 'none'" in text and not re.search(r"<script|<iframe|<object|@import|url\(| on\w+=", text)
    # Condition numbers, training, saturation, spectra of three states.
    assert len([alt for alt in re.findall('alt="([^"]*)"', text) if len(alt) > 20]) == 6
    assert len(text) < 2_000_000
    for name in ("initialisation", "iter_2.pth", "stock twin, initialisation", "cross-covariance"):
        assert name in text
    assert "Condition numbers were not logged" not in text, "names of the ConditioningHook differ"


def test_command_line_names_what_is_wrong(run, loaders, monkeypatch, capsys):
    monkeypatch.chdir(run[0].parent)
    monkeypatch.syspath_prepend(TOY)
    for arguments, message in (
        (["nothing.pth"], "nothing.pth"),
        (["--twin", "conditioned.py", "none.pth"], "none.pth"),
        (["--work-dir", "nowhere"], "nowhere"),
        (["--jacobian-tokens", "1"], "at least two tokens"),
    ):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "conditioned.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_a_browser_shows_the_page(report, tmp_path):
    """Headless: the picture has the colours of the verdict and of the figures, and nothing sticks out at the side."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    if binary is None:
        pytest.skip("needs a browser on PATH: chromium or google-chrome (Debian: apt-get install chromium)")
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,2400"]
    folders = [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    subprocess.run([binary, *options, *folders, report.as_uri()], check=True, capture_output=True, timeout=120)
    image = cv2.imread(str(picture)).astype(int)
    assert image.shape == (2400, 1280, 3)
    ink = (image < 250).any(-1)
    assert not ink[:, :20].any() and not ink[:, -20:].any(), "the page sticks out at the side"
    for red, green, blue in ((0xDA, 0xFB, 0xE1), (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # good; model; twin
        assert (abs(image - (blue, green, red)).max(-1) <= 8).sum() > 100

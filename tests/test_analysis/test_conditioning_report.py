"""The conditioning report: its numbers, its page, and the page in a real browser."""

import contextlib
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

from mmspectral.analysis.conditioning_history import kappa_history
from mmspectral.analysis.conditioning_report import Subject, collect_report
from mmspectral.analysis.jacobian import JacobianSettings, head_jacobian, xca_temperature
from mmspectral.analysis.model_states import build_model, measure, scopes, stock_twin
from mmspectral.analysis.report_html import format_number, render_report
from mmspectral.errors import UsageError
from mmspectral.layers import probe_tokens, saturation
from mmspectral.models import SpectralXCA

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "data" / "toy_classification"
SCRIPT = ROOT / "tools" / "analysis_tools" / "conditioning_report.py"
CONDITIONING = dict(type="IdentityCorrection", scale=10.0)
SECTIONS = [
    "At a glance",
    "Condition numbers by layer",
    "Spectra",
    "Over training",
    "Saturation of attention",
    "Jacobian and its bound",
]


def config(**backbone):
    arch = dict(embed_dims=24, depth=2, num_heads=2)
    settings = dict(type="mmspectral.SpectralXCiT", arch=arch, patch_size=8, conditioning=CONDITIONING)
    head = dict(type="LinearClsHead", num_classes=2, in_channels=24)
    return Config(
        dict(
            default_scope="mmpretrain",
            model=dict(type="ImageClassifier", backbone=dict(settings, **backbone), head=head),
        )
    )


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


@pytest.mark.parametrize("scope", ["full", "head"])
def test_spectra_are_those_of_the_scope_in_both_models(scope):
    cfg = config(conditioning=dict(CONDITIONING, scope=scope))
    model = build_model(cfg, seed=3)
    twin = build_model(stock_twin(cfg), seed=3)
    ours, stock = (measure(m, "start", scopes(model)) for m in (model, twin))
    names = [(f"backbone.xca_layers.{i}.attn.qkv", role) for i in range(2) for role in "qkv"]
    names += [(f"backbone.ca_layers.{i}.attn.{role}", role) for i in range(2) for role in "qkv"]
    assert [(row.layer, row.role) for row in ours.spectra] == names
    assert [row.kappa_with is None for row in ours.spectra] == [False] * 6 + [True] * 6, "class attention has no C"
    assert ours.conditioned and not stock.conditioned
    key = model.backbone.xca_layers[0].attn.qkv.weight[24:48].double()
    eye = torch.eye(24, dtype=torch.float64)
    if scope == "head":
        key, eye = key.view(2, 12, 24), torch.eye(12, 24, dtype=torch.float64)
    row = ours.spectra[1]
    worst = torch.linalg.cond(key).max().item(), torch.linalg.cond(key + 10 * eye).max().item()
    assert (row.kappa_without, row.kappa_with) == pytest.approx(worst)
    assert (row.with_[0] / row.with_[-1]).item() == pytest.approx(row.kappa_with)
    assert stock.spectra[1].kappa_without == row.kappa_without and stock.spectra[1].with_ is None


def test_saturation_is_that_of_each_layer_on_the_probe_tokens_of_its_width():
    model = build_model(config(), seed=0)
    found = measure(model, "start", scopes(model)).saturations
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


def test_history_takes_the_worst_layer_and_joins_the_logs_of_a_resumed_run(tmp_path):
    def log(folder, *lines):
        path = tmp_path / folder / "vis_data" / "scalars.json"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(lines))

    def line(step, layer, **values):
        names = {f"conditioning/b.{layer}.qkv/q/kappa_{kind}": value for kind, value in values.items()}
        return json.dumps(dict(names, step=step, loss=1.0))

    def lines(*several):
        return json.dumps({name: value for one in several for name, value in json.loads(one).items()})

    # Layer 1 has no correction, layer 2 is rank-deficient without it.
    first = lines(line(2, 0, before=7.0, after=3.0), line(2, 1, before=9.0, after=9.0), line(2, 2, after=4.0))
    log("20260101", line(0, 0, before=5.0, after=2.0), first, line(4, 0, before=1.0), json.dumps(dict(step=5)))
    log("20260102", line(4, 0, before=8.0, after=2.5), line(8, 0, before=6.0, after=1.5), '{"step": 9, "lo')
    assert kappa_history(tmp_path) == {
        "q, W": [(0, 5.0), (2, 9.0), (4, 8.0), (8, 6.0)],
        "q, W + C": [(0, 2.0), (2, 4.0), (4, 2.5), (8, 1.5)],
    }
    assert kappa_history(tmp_path / "20260101") == {}


def test_a_stock_run_has_one_curve_for_each_role(tmp_path):
    path = tmp_path / "1" / "vis_data" / "scalars.json"
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"conditioning/a.v/v/kappa_before": 2.0, "conditioning/a.v/v/kappa_after": 2.0, "step": 1})
    )
    assert kappa_history(tmp_path) == {"v, W": [(1, 2.0)]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (1.0, "1.00"),
        (0.9999, "1.00"),
        (0.01234, "0.0123"),
        (45.678, "45.7"),
        (789.4, "789"),
        (12345.0, "12,300"),
        (123456.0, "1.23 &times; 10<sup>5</sup>"),
        (-2e-5, "-2.00 &times; 10<sup>&minus;5</sup>"),
        (math.inf, "rank-deficient"),
        (None, "&ndash;"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert format_number(value) == text


def test_names_from_a_config_are_text_and_not_markup():
    page = render_report(collect_report(Subject("<script>alert(1)</script>", config())))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "Jacobian and its bound" not in page and "No run folder was given" in page


def test_what_does_not_fit_is_named(tmp_path):
    subject = Subject("a.py", config())
    with pytest.raises(UsageError, match=r"'neck'; choose one of backbone.xca_layers.0.attn, backbone.xca_layers.1"):
        collect_report(subject, jacobian=JacobianSettings("neck"))
    other = Subject("b.py", config(arch=dict(embed_dims=24, depth=1, num_heads=2), conditioning=None))
    with pytest.raises(UsageError, match=r"no attention projection backbone.xca_layers.1.attn.qkv; the twin must be"):
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
    assert list(data.histories) == [f"stock twin ({tmp_path / 'b'})"]


class Page(HTMLParser):
    """What a page refers to, and whether its tags are balanced."""

    VOID = {"meta", "link", "img", "source", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.images, self.headings, self.identifiers = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        assert tag not in ("script", "iframe", "object", "embed")
        assert not [name for name in attrs if name.startswith("on")]
        self.references += [attrs[name] for name in ("src", "srcset", "href") if name in attrs]
        self.identifiers += [attrs["id"]] if "id" in attrs else []
        if tag == "img":
            self.images.append(attrs["alt"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_page_refers_to_nothing_outside_itself(report):
    text = report.read_text()
    page = Page(text)
    assert page.headings == SECTIONS
    assert all(re.match(r"data:image/svg\+xml;base64,|data:,$|#", reference) for reference in page.references)
    assert {f"#{name}" for name in page.identifiers} == {ref for ref in page.references if ref.startswith("#")}
    # Condition numbers, spectra of three states, training, saturation.
    assert len(page.images) == 6 and all(len(alt) > 40 for alt in page.images)
    assert len(text) < 2_000_000
    assert "@import" not in text and "url(" not in text
    for name in ("initialisation", "iter_2.pth", "stock twin, initialisation", "cross-covariance"):
        assert name in text
    assert "Nothing was logged" not in text, "the ConditioningHook's names are not those that the report looks for"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.pth"], "There is no checkpoint nothing.pth."),
        (["--twin", "conditioned.py", "none.pth"], "There is no checkpoint none.pth."),
        (["--work-dir", "nowhere"], "There is no folder nowhere."),
        (["--jacobian-tokens", "1"], "the Jacobian needs at least two tokens"),
    ],
)
def test_command_line_names_what_is_wrong(run, loaders, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(run[0].parent)
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "conditioned.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


class Browser:
    """Chromium in headless mode, through ChromeDriver's HTTP interface."""

    FLAGS = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars"
    )

    def __init__(self, address, binary, profile):
        self.address = f"{address}/session"
        options = dict(binary=binary, args=[*self.FLAGS.split(), f"--user-data-dir={profile}"])
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": dict(performance="ALL")}
        self.address += "/" + self.call("", dict(capabilities=dict(alwaysMatch=always)))["sessionId"]

    def call(self, path, body):
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            return json.load(response)["value"]

    def devtools(self, command, **params):
        return self.call("/goog/cdp/execute", dict(cmd=command, params=params))

    def evaluate(self, expression):
        return self.call("/execute/sync", dict(script=f"return {expression}", args=[]))

    def show(self, file, width, scheme):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.devtools("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=scheme)])
        self.call("/url", dict(url="about:blank"))
        self.requests()  # forget those of the page that a new browser opens
        self.call("/url", dict(url=file.as_uri()))

    def requests(self):
        messages = [json.loads(entry["message"])["message"] for entry in self.call("/se/log", dict(type="performance"))]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def close(self):
        request = urllib.request.Request(self.address, method="DELETE")
        with contextlib.suppress(OSError):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    names = ("chromium", "chromium-browser", "google-chrome")
    binary, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium and ChromeDriver (Debian: apt-get install chromium chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        port = next(found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        opened = Browser(f"http://127.0.0.1:{port}", binary, tmp_path_factory.mktemp("profile"))
        yield opened
        opened.close()
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_browser_shows_the_page_without_a_network(browser, report, width, scheme):
    browser.show(report, width, scheme)
    assert browser.evaluate("[...document.querySelectorAll('h2')].map(e => e.textContent)") == SECTIONS
    loaded = browser.evaluate(
        "[...document.images].map(i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width])"
    )
    assert len(loaded) == 6
    assert all(complete and natural > 300 and shown > 300 for complete, natural, shown in loaded)
    dark = browser.evaluate(
        "[...document.images].every(i => i.currentSrc === i.parentElement.querySelector('source').srcset)"
    )
    assert dark == (scheme == "dark")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    ink, page = (browser.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in (ink, page)]
    assert (brightness[0] > brightness[1] + 450) if scheme == "dark" else (brightness[1] > brightness[0] + 450)
    requests = browser.requests()
    assert report.as_uri() in requests
    assert [url for url in requests if url != report.as_uri() and not url.startswith("data:")] == []

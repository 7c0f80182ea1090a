"""Checkpoints from anywhere: no code of theirs runs unless the caller says so, and no damaged download stays."""

import http.server
import os
import threading

import pytest
import torch
from mmengine.runner import load_checkpoint
from torch import nn

from mmspectral.checkpoints import load_backbone, read_checkpoint, write_checkpoint
from mmspectral.compat import use_safe_loading
from mmspectral.compat.checkpoints import FORCE_SAFE, FORCE_UNSAFE, load_from_source, use_trusting_loading
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError, UsageError
from tests.helpers import Call

pytestmark = pytest.mark.usefixtures("loaders")


class Server(http.server.BaseHTTPRequestHandler):
    """Serve ``files``, bytes by name; half of those whose name begins with ``cut``."""

    files: dict[str, bytes] = {}

    def do_GET(self):
        name = self.path.removeprefix("/").partition("?")[0]
        if name not in self.files:
            self.send_error(404)
            return
        content = self.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if name.startswith("cut") else content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """URL of a server on this machine, and the folder where downloads are kept."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(Server, "files", {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}", tmp_path / "torch" / "hub" / "checkpoints"
        serving.shutdown()


def content(path, **rest):
    write_checkpoint(dict(state_dict=nn.Linear(2, 2).state_dict(), **rest), path, force=True)
    return path.read_bytes()


@pytest.fixture
def attack(tmp_path):
    """A checkpoint that makes the folder ``ran`` when it is unpickled."""
    path = tmp_path / "attack.pth"
    torch.save(
        dict(state_dict=nn.Linear(2, 2).state_dict(), meta=dict(time=Call(os.mkdir, str(tmp_path / "ran")))), path
    )
    return path


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_download_is_read_and_kept(server, suffix, tmp_path):
    url, cache = server
    pytest.importorskip("safetensors")
    Server.files["linear" + suffix] = content(tmp_path / f"linear{suffix}")
    first = load_backbone(nn.Linear(2, 2), f"{url}/linear{suffix}?download=1")
    Server.files.clear()
    assert load_backbone(nn.Linear(2, 2), f"{url}/linear{suffix}") == first and first.share == 1
    assert [file.name for file in cache.iterdir()] == [f"linear{suffix}"]


@pytest.mark.parametrize(
    "name", ["cut.pth", "cut.safetensors", "cut-old.pth", "flipped.pth", "named-0123abcd.pth", "page.pth"]
)
def test_a_damaged_download_is_found_and_not_kept(server, name, tmp_path):
    url, cache = server
    whole = content(tmp_path / name)
    if name == "cut-old.pth":
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / name, _use_new_zipfile_serialization=False)
        whole = (tmp_path / name).read_bytes()
    if name == "flipped.pth":
        weight = read_checkpoint(tmp_path / name)["state_dict"]["weight"].numpy().tobytes()
        whole = whole.replace(weight, bytes([weight[0] ^ 1]) + weight[1:])
    Server.files[name] = b"<html>Please sign in</html>" if name == "page.pth" else whole
    with pytest.raises(DamagedCheckpointError, match=rf"{url}/{name} came damaged and is not kept"):
        read_checkpoint(f"{url}/{name}")
    assert list(cache.iterdir()) == []


def test_what_cannot_be_downloaded_is_one_line(server):
    url, _ = server
    for source, reason in (
        (f"{url}/absent.pth", "404"),
        ("http://127.0.0.1:9/refused.pth", "refused"),
        ("http://[/no.pth", "URL|port|Invalid"),
        ("torchvision://absent", "torchvision.* has no absent"),
        ("openmmlab://absent", "openmmlab.* has no absent"),
    ):
        with pytest.raises(UsageError, match=reason) as refused:
            read_checkpoint(source)
        assert source.rpartition("/")[2] in str(refused.value) and "\n" not in str(refused.value)


def test_names_in_mmengines_lists_are_downloaded(server, tmp_path, monkeypatch):
    url, _ = server
    Server.files["listed.pth"] = content(tmp_path / "listed.pth")
    monkeypatch.setattr("mmspectral.compat.checkpoints._LISTS", {"mmcls": lambda: {"net": f"{url}/listed.pth"}})
    assert load_from_source("mmcls://net")["state_dict"] == {}  # mmengine keeps the names under backbone.


@pytest.mark.parametrize("inherited", [None, FORCE_UNSAFE, FORCE_SAFE])
def test_no_code_runs_unless_this_call_or_process_says_so(server, attack, inherited, monkeypatch):
    url, _ = server
    Server.files["attack.pth"] = attack.read_bytes()
    if inherited:
        monkeypatch.setenv(inherited, "1")
    for source in (attack, str(attack), f"{url}/attack.pth", "s3://bucket/attack.pth", "petrel://attack.pth"):
        with pytest.raises(UnsafeCheckpointError, match=r"attack.pth is not read.*--trust-checkpoint"):
            read_checkpoint(source)
        with pytest.raises(UnsafeCheckpointError):
            load_backbone(nn.Linear(2, 2), source)
    ran = attack.with_name("ran")
    assert not ran.exists() and os.environ.get(inherited or "") == ("1" if inherited else None)
    for source in (attack, f"{url}/attack.pth"):
        assert load_backbone(nn.Linear(2, 2), source, trust=True).share == 1
        ran.rmdir()
    use_trusting_loading()
    read_checkpoint(attack)
    ran.rmdir()
    use_safe_loading()
    for source in (str(attack), f"{url}/attack.pth"):
        with pytest.raises(UnsafeCheckpointError):
            load_checkpoint(nn.Linear(2, 2), source)
    assert not ran.exists()

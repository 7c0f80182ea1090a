"""No code of a checkpoint runs, and what mmengine's Runner saves is read."""

import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import load_checkpoint

from mmspectral.compat.checkpoints import (
    FORCE_SAFE,
    FORCE_UNSAFE,
    load_from_local,
    refusal_reason,
    use_safe_loading,
    use_trusting_loading,
)
from mmspectral.errors import UnsafeCheckpointError
from tests.helpers import Call


@pytest.fixture
def attack(tmp_path):
    """A checkpoint of a linear layer that makes a folder when it is unpickled."""
    state = dict(state_dict=torch.nn.Linear(2, 2).state_dict(), meta=dict(time=Call(os.mkdir, str(tmp_path / "ran"))))
    path = tmp_path / "attack.pth"
    torch.save(state, path)
    return path


@pytest.mark.parametrize("core", ["core", "_core"])
def test_what_the_runner_saves_is_read_back_whichever_numpy_wrote_it(tmp_path, core):
    buffer = HistoryBuffer([3.0, 1.0, 2.0], [1, 1, 1])
    info = dict(best=np.float64(0.5), count=np.int64(7))
    torch.save(dict(message_hub=dict(log_scalars=dict(loss=buffer), runtime_info=info)), tmp_path / "here.pth")
    with zipfile.ZipFile(tmp_path / "here.pth") as here, zipfile.ZipFile(tmp_path / "there.pth", "w") as there:
        for name in here.namelist():
            content = here.read(name)
            for written in (b"numpy.core.", b"numpy._core."):
                content = content.replace(written, f"numpy.{core}.".encode())
            there.writestr(name, content)
    hub = load_from_local(str(tmp_path / "there.pth"), "cpu")["message_hub"]
    loss = hub["log_scalars"]["loss"]
    assert (loss.mean(), loss.statistics("min"), loss.max(), loss.current()) == (2.0, 1.0, 3.0, 2.0)
    assert hub["runtime_info"] == dict(best=0.5, count=7)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(HistoryBuffer, "update"), (HistoryBuffer, "__init__"), (HistoryBuffer.min, "__globals__")],
    ids=["other method", "constructor", "module of a method"],
)
def test_getattr_reaches_nothing_but_the_statistics_of_log_buffers(tmp_path, owner, name):
    torch.save(dict(meta=Call(getattr, owner, name)), tmp_path / "reach.pth")
    with pytest.raises(UnsafeCheckpointError, match=f"reach.pth.*{name}"):
        load_from_local(str(tmp_path / "reach.pth"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth"):
        load_from_local(str(tmp_path / "nowhere.pth"))


def test_mmengine_does_not_run_code_once_loading_is_safe(attack, loaders):  # tests/test_fuzz.py has other attacks
    os.environ[FORCE_UNSAFE] = "1"
    use_safe_loading()
    with pytest.raises(UnsafeCheckpointError, match=r"attack\.pth.*mkdir.*--trust-checkpoint"):
        load_checkpoint(torch.nn.Linear(2, 2), str(attack))
    with pytest.raises(pickle.UnpicklingError) as refused:
        torch.load(attack, weights_only=False)
    assert "mkdir" in refusal_reason(refused.value)
    assert not attack.with_name("ran").exists()


def test_trust_lifts_the_refusal(attack, loaders):
    os.environ[FORCE_SAFE] = "1"
    use_trusting_loading()
    model = torch.nn.Linear(2, 2)
    load_checkpoint(model, str(attack))
    assert attack.with_name("ran").is_dir()

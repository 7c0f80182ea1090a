"""The file backend, the checkpoint hook, what find_damage finds, and which file is resumed."""

import errno
import functools
import io
import os
import resource
import stat
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.fileio import get_file_backend
from mmengine.hooks import Hook
from mmengine.model import BaseModule

from mmspectral.compat.atomic_write import FileWriteError
from mmspectral.compat.checkpoint_damage import find_damage
from mmspectral.compat.checkpoints import load_from_local
from mmspectral.engine.hooks.checkpoint_hook import AtomicBackend, CheckpointHook
from mmspectral.engine.launch import require_writable
from mmspectral.engine.resume import choose_checkpoint
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError, UsageError
from mmspectral.registry import HOOKS

RUN = dict(
    meta=dict(epoch=1, iter=4, seed=7),
    message_hub=dict(),
    optimizer=dict(),
    state_dict=dict(weight=torch.arange(1000.0)),
)


@pytest.fixture
def full_disk():
    """Return a function that makes writes beyond so many bytes of a file fail, as the kernel does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def flip_bit(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 0b100
    path.write_bytes(content)


def offset_of_weight(path):
    """Position of a byte of the first tensor."""
    with zipfile.ZipFile(path) as archive:
        record = next(record for record in archive.infolist() if record.filename.endswith("/data/0"))
    return record.header_offset + 500


def test_backend_writes_bytes_and_text(tmp_path):
    backend = get_file_backend(backend_args=dict(backend="atomic"))
    assert type(backend) is AtomicBackend
    path = tmp_path / "new" / "file"
    for content in (b"first", b"second"):
        backend.put(content, str(path))
        assert path.read_bytes() == content
    backend.put_text("größer", path)
    assert path.read_text(encoding="utf-8") == "größer"
    assert list(path.parent.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_backend_removes_what_a_killed_write_left(tmp_path):
    leftover, foreign = tmp_path / ".epoch_1.pth.abc.tmp", tmp_path / ".epoch_10.pth.abc.tmp"
    leftover.touch()
    foreign.touch()
    AtomicBackend().put(b"content", tmp_path / "epoch_1.pth")
    assert not leftover.exists() and foreign.exists()


@pytest.mark.fault
def test_a_full_disk_leaves_the_old_file(tmp_path, full_disk):
    path = tmp_path / "epoch_1.pth"
    path.write_bytes(b"old")
    full_disk(1000)
    with pytest.raises(
        FileWriteError, match=r"epoch_1.pth \(0.0 MiB\) could not be written.*MiB free.*is as it was"
    ) as e:
        AtomicBackend().put(b"x" * 1001, path)
    assert e.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileWriteError, match=r"epoch_2.pth does not exist"):
        AtomicBackend().put(b"x" * 1001, tmp_path / "epoch_2.pth")


@pytest.mark.fault
def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "work").write_text("mine")
    with pytest.raises(FileWriteError, match="could not be written"):
        AtomicBackend().put(b"content", tmp_path / "work" / "epoch_1.pth")
    for folder in (tmp_path / "work", tmp_path / "work" / "below"):
        with pytest.raises(UsageError, match=r"work.* cannot be written.*--work-dir"):
            require_writable(str(folder))
    assert (tmp_path / "work").read_text() == "mine"


@pytest.mark.fault
def test_a_read_only_work_folder():
    """Permissions do not bind root, which becomes somebody else for a moment."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as parent:  # pytest's folders are closed to others
        os.chmod(parent, 0o755)
        folder = Path(parent, "work")
        folder.mkdir(mode=0o555)
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(UsageError, match=r"work cannot be written: Permission denied.*--work-dir"):
                require_writable(str(folder))
        finally:
            os.seteuid(user)
        assert not list(folder.iterdir())


@pytest.mark.parametrize("fault", ["truncated weights", "flipped bit"])
@pytest.mark.fault
def test_damaged_weights_are_named(tmp_path, safe_loading, fault):
    """Also those of a model that is not ours."""
    path = tmp_path / "weights.pth"
    torch.save(dict(state_dict=torch.nn.Linear(64, 64).state_dict()), path)
    load_from_local(str(path))
    content = bytearray(path.read_bytes())
    if fault == "flipped bit":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: -1 if fault == "truncated weights" else None])
    model = BaseModule(init_cfg=dict(type="Pretrained", checkpoint=str(path)))
    for load in (model.init_weights, functools.partial(load_from_local, str(path))):
        with pytest.raises(DamagedCheckpointError, match=r"weights.pth is damaged: its .*Copy or download it again"):
            load()


def test_no_damage_changes_what_is_read_unnoticed(tmp_path):
    """Whatever bit flips, the file is refused or means the same; one that is cut off is refused."""
    path = tmp_path / "checkpoint.pth"
    small = dict(state_dict=dict(weight=torch.arange(4.0)), meta=dict(seed=7))
    torch.save(small, path)
    content = path.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert f"{size} bytes are no complete archive" in find_damage(path)
    unnoticed = 0
    for offset in range(len(content)):
        changed = bytearray(content)
        changed[offset] ^= 1 << offset % 8
        path.write_bytes(changed)
        if find_damage(path) is None:
            unnoticed += 1
            try:
                loaded = torch.load(io.BytesIO(changed), weights_only=True)
            except RuntimeError:
                continue
            assert loaded["meta"] == small["meta"]
            assert torch.equal(loaded["state_dict"]["weight"], small["state_dict"]["weight"])
    assert 0 < unnoticed < len(content), "padding between records means nothing"


def config(work_dir, **settings):
    return Config(dict(work_dir=str(work_dir), resume=True, **settings))


def save(work_dir, *names, content=RUN):
    work_dir.mkdir(exist_ok=True)
    for name in names:
        torch.save(content, work_dir / name)


@pytest.mark.fault
def test_the_newest_whole_checkpoint_is_resumed_and_none_begins_anew_over_damaged_ones(safe_loading, tmp_path):
    save(tmp_path, "epoch_2.pth", "epoch_9.pth", "epoch_10.pth", "epoch_11.pth", "best_acc_epoch_12.pth", "iter_40.pth")
    (tmp_path / "last_checkpoint").write_text(str(tmp_path / "epoch_11.pth"))
    flip_bit(tmp_path / "epoch_11.pth", offset_of_weight(tmp_path / "epoch_11.pth"))
    (tmp_path / "epoch_10.pth").write_bytes((tmp_path / "epoch_10.pth").read_bytes()[:900])
    cfg = config(tmp_path)
    notes = choose_checkpoint(cfg)
    assert cfg.load_from == str(tmp_path / "epoch_9.pth") and cfg.randomness.seed == 7
    assert [note.partition(" ")[0] for note in notes] == [str(tmp_path / f"epoch_{n}.pth") for n in (11, 10)]
    for name in ("epoch_9.pth", "epoch_2.pth"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=r"epoch_9.pth is passed over.*epoch_2.pth is passed over.*--work-dir"):
        choose_checkpoint(config(tmp_path))
    cfg = config(tmp_path, default_hooks=dict(checkpoint=dict(by_epoch=False)), randomness=dict(seed=3))
    assert choose_checkpoint(cfg) == []
    assert cfg.load_from == str(tmp_path / "iter_40.pth") and cfg.randomness.seed == 3


@pytest.mark.parametrize("template", ["state-{}.pth", "state-{:04d}.pth", "{0}.state-{0:}.pth"])
@pytest.mark.fault
def test_checkpoints_in_another_folder_and_under_another_name(safe_loading, tmp_path, template):
    save(tmp_path / "run", *(template.format(number) for number in (3, 11)))
    (tmp_path / "run" / template.format(11)).write_bytes(b"")
    hook = dict(out_dir=str(tmp_path), filename_tmpl=template)
    cfg = config(tmp_path / "elsewhere" / "run", default_hooks=dict(checkpoint=hook))
    assert len(choose_checkpoint(cfg)) == 1
    assert cfg.load_from == str(tmp_path / "run" / template.format(3))


def test_only_a_flexible_runner_resumes_from_a_folder(safe_loading, tmp_path):
    """Its strategies write sharded checkpoints, and only they can read them."""
    (tmp_path / "epoch_2.pth").mkdir()
    save(tmp_path, "epoch_1.pth")
    for settings, name, notes in ((dict(runner_type="FlexibleRunner"), "epoch_2.pth", 0), ({}, "epoch_1.pth", 1)):
        cfg = config(tmp_path, **settings)
        assert len(choose_checkpoint(cfg)) == notes and cfg.load_from == str(tmp_path / name)


@pytest.mark.parametrize("stale", ["deleted/epoch_1.pth", "other/epoch_1.pth"])
@pytest.mark.parametrize("resume", [True, "auto"])
def test_without_a_checkpoint_a_resumed_run_begins_as_its_config_says(tmp_path, stale, resume):
    """From load_from, whatever the file last_checkpoint names."""
    save(tmp_path / "other", "epoch_1.pth")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last_checkpoint").write_text(str(tmp_path / stale))
    source = str(tmp_path / "other" / "epoch_1.pth") if resume == "auto" else None
    cfg = config(tmp_path / "run", load_from=source)
    cfg.resume = resume
    assert choose_checkpoint(cfg) == [] and (cfg.resume, cfg.load_from) == (False, source)
    save(tmp_path / "run", "epoch_1.pth")
    cfg.resume = resume
    assert choose_checkpoint(cfg) == [] and (cfg.resume, cfg.load_from) == (True, str(tmp_path / "run" / "epoch_1.pth"))


@pytest.mark.fault
def test_a_named_checkpoint_is_resumed_or_refused(safe_loading, tmp_path):
    save(tmp_path, "good.pth")
    save(tmp_path, "weights.pth", content=RUN["state_dict"])
    save(tmp_path, "code.pth", content=dict(RUN, path=tmp_path))
    (tmp_path / "zip.pth").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "zip.pth", "w") as archive:
        archive.writestr("text", "no checkpoint")
    torch.save(RUN, tmp_path / "old.pth", _use_new_zipfile_serialization=False)  # as torch < 1.6 did
    for name in ("good.pth", "old.pth"):
        cfg = config(tmp_path, load_from=str(tmp_path / name))
        assert choose_checkpoint(cfg) == [] and cfg.load_from == str(tmp_path / name)
    save(tmp_path, "new.pth", content={name: RUN[name] for name in ("meta", "message_hub", "state_dict")})
    (note,) = choose_checkpoint(config(tmp_path, load_from=str(tmp_path / "new.pth")))
    assert "no state of the optimizer" in note
    save(tmp_path, "meta.pth", content=dict(RUN, meta=None))
    save(tmp_path, "iter.pth", content=dict(RUN, meta=dict(epoch=1)))
    (tmp_path / "cut.pth").write_bytes((tmp_path / "old.pth").read_bytes()[:-100])
    for name, reason in {
        "weights.pth": "it holds weights",
        "zip.pth": "torch cannot read it",
        "cut.pth": "torch cannot read it",
        "meta.pth": "its meta is not",
        "iter.pth": r"its meta\['iter'\] is not",
    }.items():
        with pytest.raises(UsageError, match=rf"{name} is passed over: {reason}"):
            choose_checkpoint(config(tmp_path, load_from=str(tmp_path / name)))
    with pytest.raises(UsageError, match="no checkpoint nowhere.pth"):
        choose_checkpoint(config(tmp_path, load_from="nowhere.pth"))
    with pytest.raises(UnsafeCheckpointError, match=r"code.pth.*--trust-checkpoint"):
        choose_checkpoint(config(tmp_path, load_from=str(tmp_path / "code.pth")))


@pytest.mark.fault
def test_damaged_weights_are_not_loaded_without_resuming(tmp_path):
    torch.save(RUN, tmp_path / "weights.pth", _use_new_zipfile_serialization=False)
    cfg = Config(dict(load_from=str(tmp_path / "weights.pth")))
    assert choose_checkpoint(cfg) == [] and "randomness" not in cfg
    save(tmp_path, "weights.pth")
    assert choose_checkpoint(cfg) == []
    flip_bit(tmp_path / "weights.pth", offset_of_weight(tmp_path / "weights.pth"))
    with pytest.raises(UsageError, match=r"weights.pth is damaged.*does not match its checksum"):
        choose_checkpoint(cfg)
    assert choose_checkpoint(Config(dict(load_from="https://example.org/weights.pth"))) == []


class Breaking(Hook):
    """Call ``trouble(runner)`` before each iteration."""

    def __init__(self, trouble):
        self.trouble = trouble

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.trouble(runner)


@pytest.fixture
def train(count, tmp_path):
    """Return a function that trains with the hook, and better with each epoch, and returns the hook."""

    def run(epochs=5, trouble=lambda runner: None, **settings):
        hook = CheckpointHook(interval=1, **settings)
        count(tmp_path, range(1, epochs + 1), hook, [Breaking(trouble)])
        return hook

    return run


def names(folder):
    return sorted(path.name for path in folder.glob("*.pth"))


def test_the_hook_is_registered_and_writes_atomically():
    assert HOOKS.get("mmspectral.CheckpointHook") is CheckpointHook
    assert CheckpointHook().backend_args == dict(backend="atomic")
    assert CheckpointHook(out_dir="s3://bucket").backend_args is None
    assert CheckpointHook(backend_args=dict(backend="petrel")).backend_args == dict(backend="petrel")


@pytest.mark.parametrize(("asked", "kept"), [(1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (-1, [1, 2, 3, 4, 5])])
def test_so_many_checkpoints_are_kept(train, tmp_path, asked, kept):
    train(max_keep_ckpts=asked)
    assert names(tmp_path) == [f"epoch_{number}.pth" for number in kept]
    noted = torch.load(tmp_path / "epoch_5.pth", weights_only=False)["message_hub"]["runtime_info"].get("keep_ckpt_ids")
    assert noted == (kept if asked > 0 else None)


def test_the_old_checkpoint_goes_after_the_new_one_has_come(train, tmp_path):
    """Audited: when a checkpoint is deleted, its successor stands."""
    deleted = []

    def audit(event, arguments):
        if event == "os.remove" and str(arguments[0]).startswith(str(tmp_path)) and str(arguments[0]).endswith(".pth"):
            deleted.append((Path(arguments[0]).name, names(tmp_path)))

    sys.addaudithook(audit)
    train(epochs=4, max_keep_ckpts=2, save_best="acc")
    regular = [(name, standing) for name, standing in deleted if name.startswith("epoch")]
    best = [(name, standing) for name, standing in deleted if name.startswith("best")]
    assert [name for name, _ in regular] == ["epoch_1.pth", "epoch_2.pth"]
    assert all({f"epoch_{n}.pth" for n in (k, k + 1, k + 2)} <= set(there) for k, (_, there) in enumerate(regular, 1))
    assert [name for name, _ in best] == [f"best_acc_epoch_{number}.pth" for number in (1, 2, 3)]
    assert all(f"best_acc_epoch_{number + 1}.pth" in there for number, (_, there) in enumerate(best, 1))
    assert names(tmp_path) == ["best_acc_epoch_4.pth", "epoch_3.pth", "epoch_4.pth"]


@pytest.mark.fault
def test_a_failed_save_stops_training_and_harms_nothing(train, tmp_path, full_disk):
    with pytest.raises(FileWriteError, match=r"epoch_3.pth .* does not exist; free space"):
        train(max_keep_ckpts=2, trouble=lambda runner: full_disk(100) if runner.epoch == 2 else None)
    assert names(tmp_path) == ["epoch_1.pth", "epoch_2.pth"]
    assert all(find_damage(tmp_path / name) is None for name in names(tmp_path))


@pytest.mark.fault
def test_tolerated_failures_are_counted_and_training_goes_on(train, tmp_path, full_disk):
    def trouble(runner):
        full_disk(100 if runner.epoch in (2, 3) else resource.RLIM_INFINITY)

    hook = train(max_keep_ckpts=2, tolerated_failures=4, save_best="acc", trouble=trouble)
    assert hook.failures == 0, "it starts again after a success"
    assert names(tmp_path) == ["best_acc_epoch_5.pth", "epoch_2.pth", "epoch_5.pth"]
    assert hook.best_ckpt_path.endswith("best_acc_epoch_5.pth") and list(hook.keep_ckpt_ids) == [2, 5]

"""A name stands for the old content or the new one; see test_engine/test_atomic_checkpoints.py for full disks."""

import os
import stat
from pathlib import Path

import pytest

from mmspectral.compat.atomic_write import write_atomically


def test_the_name_is_taken_after_the_content_is_on_the_disk(tmp_path, monkeypatch):
    path, synced, replace, fsync = tmp_path / "file", [], os.replace, os.fsync
    path.write_bytes(b"old")

    def checked_fsync(handle):
        synced.append(os.fstat(handle).st_size if stat.S_ISREG(os.fstat(handle).st_mode) else "folder")
        fsync(handle)

    def checked_replace(source, target):
        assert synced == [6], "all bytes are on the disk"
        assert path.read_bytes() == b"old" and Path(source).read_bytes() == b"latest"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", checked_fsync)
    monkeypatch.setattr(os, "replace", checked_replace)
    write_atomically(b"latest", path)
    assert path.read_bytes() == b"latest" and synced == [6, "folder"]


def test_a_name_that_may_not_be_taken(tmp_path):
    path = tmp_path / "new" / "file"
    write_atomically(b"first", path, overwrite=False)
    with pytest.raises(FileExistsError):
        write_atomically(b"second", path, overwrite=False)
    assert path.read_bytes() == b"first" and list(path.parent.iterdir()) == [path]

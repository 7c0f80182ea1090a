"""Keep two trainings out of one work folder."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmengine.logging import print_log

from mmspectral.errors import UsageError

NAME = ".training"
INTERVAL = 30.0  # seconds between two beats


@contextmanager
def locked(folder: str) -> Iterator[str | None]:
    """Hold a work folder; yields None, or a sentence that says why it could not be locked.

    The file ``.training`` names the owner: machine, process and the time of its start, so that a dead owner on this
    machine is replaced at once. One on another machine, whose processes cannot be seen, counts up in the file; it is
    dead once the count has stood still for two intervals of the reader's own clock. The file of a copied folder says
    nothing about the copy.

    Raises:
        UsageError: Another training lives in the folder.
    """
    path, ended, note = Path(folder, NAME), threading.Event(), None
    try:
        content = dict(owner=_identity(os.getpid()), folder=os.stat(folder).st_ino, beat=0)
        _take(path, content)
    except OSError as error:
        note = f"{path} cannot be locked ({error.strerror}): a second training in this folder would not be noticed."
    if note is not None:
        yield note
        return
    thread = threading.Thread(target=_beat, args=(path, content, ended), daemon=True)
    thread.start()
    try:
        yield None
    finally:
        ended.set()
        thread.join()
        if _is_own(path, content):
            with suppress(OSError):
                path.unlink()


def _identity(pid: int) -> list | None:
    """Return machine (with boot and, in containers, process space), process and its start; None for a dead process."""
    machine = [socket.gethostname()]
    with suppress(OSError):  # no Linux
        machine += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if state in "ZX" else [*machine, pid, fields[18]]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return [*machine, pid, ""]


def _take(path: Path, own: dict) -> None:
    fresh = _write(path, own)
    try:
        while True:
            try:
                os.link(fresh, path)  # fails where there is one, also if it came meanwhile
                return
            except FileExistsError:
                content = _read(path)
            if _lives(path, content, own):
                owner = content["owner"]
                raise UsageError(
                    f"Another training, process {owner[-2]} on {owner[0]}, writes to {path.parent.absolute()}. End it, "
                    "or name another folder by --work-dir."
                )
            if _read(path) == content:  # else another process has just taken the place of the dead owner
                with suppress(FileNotFoundError):
                    path.unlink()
    finally:
        fresh.unlink(missing_ok=True)


def _lives(path: Path, content: dict, own: dict) -> bool:
    owner = content.get("owner")
    if not isinstance(owner, list) or len(owner) < 3:
        return False
    if owner[:-2] == own["owner"][:-2]:
        return content.get("folder") == own["folder"] and _identity(owner[-2]) == owner
    print_log(
        f"Waiting up to {2 * INTERVAL:g} s to see whether the training of {owner[0]} in {path.parent} lives.", "current"
    )
    end = time.monotonic() + 2 * INTERVAL
    while time.monotonic() < end and (now := _read(path)):
        if now != content:
            return True
        time.sleep(INTERVAL / 30)
    return False


def _read(path: Path) -> dict:
    with suppress(OSError, ValueError):  # torn by a crash of the machine
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _write(path: Path, content: dict) -> Path:
    fresh = path.with_name(f"{NAME}.{socket.gethostname()}.{os.getpid()}")
    fresh.write_text(json.dumps(content))
    return fresh


def _is_own(path: Path, content: dict) -> bool:
    return _read(path).get("owner") == content["owner"]


def _beat(path: Path, content: dict, ended: threading.Event) -> None:
    while not ended.wait(INTERVAL):
        content["beat"] += 1
        with suppress(OSError):  # a full disk must not end the training
            fresh = _write(path, content)
            if _is_own(path, content):
                os.replace(fresh, path)

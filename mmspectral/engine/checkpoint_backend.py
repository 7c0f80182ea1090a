"""A file backend that writes a file completely or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

BACKEND = "atomic"


class FileWriteError(OSError):
    """A file could not be written; what stood under its name is unchanged."""


@register_backend(BACKEND)
class AtomicBackend(LocalBackend):
    """mmengine's local backend, with writes that a kill, a crash or a full disk cannot tear.

    ``backend_args=dict(backend='atomic')``. The bytes go to a hidden file in the
    same folder and to the disk (``fsync``); then the file takes its name in one
    step, and the folder is synchronised. At every moment the name stands for the
    old content or for the new one. A process that is killed meanwhile leaves its
    hidden file behind, which the next write under the same name removes, so one
    process at a time may write a name.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write bytes.

        Args:
            obj: Content of the file.
            filepath: Its path; its folder is made.

        Raises:
            FileWriteError: The disk is full, or the folder cannot be written.
        """
        self._write(obj, Path(filepath))

    def put_text(self, obj: str, filepath: str | Path, encoding: str = "utf-8") -> None:
        """Write text; as :meth:`put`."""
        self._write(obj.encode(encoding), Path(filepath))

    def _write(self, content: bytes, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for leftover in path.parent.glob(f".{path.name}.*.tmp"):
                leftover.unlink()
            with _temporary(path) as (file, name):
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(name, path)
            _synchronize(path.parent)
        except OSError as error:
            raise FileWriteError(error.errno, _explanation(path, len(content), error)) from error


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator:
    """Yield an open file beside ``path`` and its name; it does not outlive a failure."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)  # mkstemp's file is private
            yield file, name
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _synchronize(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explanation(path: Path, size: int, error: OSError) -> str:
    message = f"{path} ({size / 2**20:.1f} MiB) could not be written: {error.strerror}."
    if path.parent.is_dir():
        message += f" Its disk has {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB free."
    standing = "is as it was" if path.is_file() else "does not exist"
    return f"{message} {path.name} {standing}; free space or mend the folder, then continue with --resume."

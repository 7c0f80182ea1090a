"""Write a file so that its name never stands for a part of it."""

import os
import shutil
import tempfile
from pathlib import Path


class FileWriteError(OSError):
    """A file could not be written; what stood under its name is unchanged."""


def write_atomically(content: bytes | memoryview, path: Path, overwrite: bool = True) -> None:
    """Write a file that a kill, a crash or a full disk cannot tear.

    The bytes go to a hidden file in the same folder and to the disk (``fsync``); then the file takes its name in one
    step, and the folder, made where it is missing, is synchronised. A process that is killed meanwhile leaves its
    hidden file behind, which the next write under the same name removes, so one process at a time may write a name.

    Raises:
        FileExistsError: The name is taken, and ``overwrite`` is False.
        FileWriteError: The disk is full, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            leftover.unlink()
        # In the same folder, so that the last step is a rename.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(temporary, 0o666 & ~umask)  # mkstemp's file is private
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # unlike a rename this fails if the name was taken meanwhile
        finally:
            Path(temporary).unlink(missing_ok=True)
        if os.name != "nt":  # folders cannot be opened there
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            raise
        raise FileWriteError(error.errno, _explanation(path, len(content), error)) from error


def _explanation(path: Path, size: int, error: OSError) -> str:
    message = f"{path} ({size / 2**20:.1f} MiB) could not be written: {error.strerror}."
    if path.parent.is_dir():
        message += f" Its disk has {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB free."
    standing = "is as it was" if path.is_file() else "does not exist"
    return (
        f"{message} {path.name} {standing}; free space or make the folder writable, then repeat the command "
        "(a training: with --resume)."
    )

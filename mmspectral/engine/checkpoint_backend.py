"""A file backend that writes a file completely or not at all."""

from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

from mmspectral.compat.atomic_write import FileWriteError, write_atomically

__all__ = ["BACKEND", "AtomicBackend", "FileWriteError"]
BACKEND = "atomic"


@register_backend(BACKEND)
class AtomicBackend(LocalBackend):
    """mmengine's local backend, with writes that a kill, a crash or a full disk cannot tear.

    ``backend_args=dict(backend='atomic')``; see
    :func:`mmspectral.compat.atomic_write.write_atomically`.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write bytes.

        Args:
            obj: Content of the file.
            filepath: Its path; its folder is made.

        Raises:
            FileWriteError: The disk is full, or the folder cannot be written.
        """
        write_atomically(obj, Path(filepath))

    def put_text(self, obj: str, filepath: str | Path, encoding: str = "utf-8") -> None:
        """Write text; as :meth:`put`."""
        write_atomically(obj.encode(encoding), Path(filepath))

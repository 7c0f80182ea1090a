"""Read images, and say which one cannot be read."""

import logging
from pathlib import Path

import cv2
import mmcv.transforms
from mmengine.logging import print_log
from PIL import Image

from mmspectral.datasets.check.coco import is_narrow
from mmspectral.registry import TRANSFORMS

# How a complete file of the format ends, by how it begins.
_ENDINGS = {b"\xff\xd8\xff": b"\xff\xd9", b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82"}
_TAIL = 4096  # bytes; some cameras and editors append a few after the end


class UnreadableImageError(RuntimeError):
    """An image is missing, damaged, cut short or of another size than its annotations."""


@TRANSFORMS.register_module()
class LoadImageFromFile(mmcv.transforms.LoadImageFromFile):
    """mmcv's loader, with an error that names the file, and with truncated files found.

    OpenCV reads the rows of a JPEG that are there and leaves the others grey, without an error, so a JPEG or PNG file
    of this machine must have its end mark, or be whole to Pillow.

    Args:
        skip_unreadable: Whether an image that cannot be read is replaced by another one of the training set, drawn at
            random, counted and logged, instead of ending the run. Counts are those of one process: a worker of the data
            loader, or the main process where there are none.
        **kwargs: As mmcv's.
    """

    def __init__(self, skip_unreadable: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.skip_unreadable = skip_unreadable
        self.skipped = 0

    def transform(self, results: dict) -> dict | None:
        """Read ``results['img_path']``.

        Raises:
            UnreadableImageError: It cannot be read, and is not to be skipped.
        """
        path, stated = results["img_path"], (results.get("height"), results.get("width"))
        try:
            if not self.backend_args and not self.file_client_args and "://" not in str(path):
                _require_end(path)
            loaded = super().transform(results)
            if loaded is not None:
                _require_size(*loaded["img"].shape[:2], *stated)
            return loaded
        except (OSError, AssertionError, ValueError, cv2.error) as error:
            if self.ignore_empty:  # mmcv's own way to skip
                return None
            reason = f"{path} cannot be used: {' '.join(str(error).split()) or type(error).__name__}"
            if not self.skip_unreadable:
                raise UnreadableImageError(
                    f"{reason}. Restore the file or take it out of the annotations; to train without it, "
                    "set skip_unreadable=True of LoadImageFromFile in train_dataloader.dataset.pipeline."
                ) from error
        self.skipped += 1
        print_log(f"Image skipped, {self.skipped} in this process: {reason}.", "current", logging.WARNING)
        return None

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, skip_unreadable={self.skip_unreadable})"


def _require_size(height: int, width: int, stated_height: int | None, stated_width: int | None) -> None:
    """Raise ValueError if an image is not as large as its annotations say, or vanishes when it is resized."""
    if None not in (stated_height, stated_width) and (height, width) != (stated_height, stated_width):
        raise ValueError(
            f"it is {width} x {height} pixels (turned, if its EXIF says so), its annotations are for {stated_width} x "
            f"{stated_height}"
        )
    if is_narrow(height, width):
        raise ValueError(f"with {width} x {height} pixels it vanishes when it is resized")


def _require_end(path: str) -> None:
    """Raise OSError if a local file begins like a JPEG or PNG image and is cut short."""
    with Path(path).open("rb") as file:
        head = file.read(8)
        ending = next((end for start, end in _ENDINGS.items() if head.startswith(start)), None)
        if ending is not None:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            if ending not in file.read():
                try:
                    Image.open(file).load()  # slower; such as phones write with a film behind the image are whole
                except (OSError, SyntaxError) as error:  # the latter for broken PNG chunks
                    raise OSError(f"the file is cut short: its {size} bytes have no end mark") from error

"""Tell whether a checkpoint file is whole."""

import zipfile
import zlib
from pathlib import Path

_FOLDER = 0x10  # attribute of a zip entry; torch reads nothing from one that has it


def find_damage(path: str | Path) -> str | None:
    """Compare each record of a checkpoint with the CRC-32 that ``torch.save`` wrote beside it.

    ``torch.load`` does not: a flipped bit in a weight is read as another weight. The whole file is read once and no
    code from it is run.

    Returns:
        What is wrong with the file of torch >= 1.6, or None.

    Raises:
        OSError: There is no such file.
    """
    size = Path(path).stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                # No checksum covers the entries, but torch.save compresses nothing, so that both sizes are the same.
                stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
                if not stored or info.external_attr & _FOLDER:
                    return f"the entry of its record {info.filename} contradicts itself"
            record = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        # What zipfile raises for damaged headers: a wrong signature, compression method, encryption flag or offset.
        return f"its {size} bytes are no complete archive: {error}"
    return None if record is None else f"its record {record} does not match its checksum"

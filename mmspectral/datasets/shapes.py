"""The embedded demo set: geometric shapes with instance masks in COCO's format."""

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from filelock import FileLock
from mmdet.datasets import CocoDataset
from mmengine.logging import print_log

from mmspectral.arguments import FLAG, check, one_of, whole
from mmspectral.datasets.shapes_render import CLASSES, render
from mmspectral.registry import DATASETS

# Part of the folder's name: raise it with every change to what is drawn or written.
_VERSION = 1
_DEFAULT_COUNTS = {"train": 400, "val": 100}
_DEFAULT_SIZE = 160
_DEFAULT_SEED = 0
_MIN_SIZE = 64
# Content hashes of the default sets, see `_write`.
_EXPECTED = {
    "train": "66b5a27bcdeda22a9fe07355c51a20e45a3051943c726ff1cb4756472f35ec2b",
    "val": "35ed952262516849591eda4609beb93742bf485f1be299127540438f3bce3362",
}
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _Settings:
    split: str
    num_images: int
    image_size: int
    seed: int
    colour_cue: bool = True
    version: int = _VERSION

    @classmethod
    def of(cls, split: str, num_images: int | None, image_size: int, seed: int, colour_cue: bool = True) -> "_Settings":
        split = check("ShapesDataset: split", split, one_of(*_DEFAULT_COUNTS))
        num_images = _DEFAULT_COUNTS[split] if num_images is None else num_images
        num_images = check("ShapesDataset: num_images", num_images, whole(1, 10**7))
        image_size = check("ShapesDataset: image_size", image_size, whole(_MIN_SIZE, 1 << 14))
        seed = check("ShapesDataset: seed", seed, whole(0))
        colour_cue = check("ShapesDataset: colour_cue", colour_cue, FLAG)
        return cls(split, num_images, image_size, seed, colour_cue)

    @property
    def folder_name(self) -> str:
        name = f"shapes-v{self.version}-{self.split}{self.num_images}-{self.image_size}px-seed{self.seed}"
        return name if self.colour_cue else f"{name}-no-colour-cue"

    @property
    def images(self) -> str:
        return f"{self.split}2017"

    @property
    def annotations(self) -> str:
        return f"annotations/instances_{self.split}2017.json"

    @property
    def expected_hash(self) -> str | None:
        """The published content hash; None unless all settings are the defaults."""
        defaults = _Settings(self.split, _DEFAULT_COUNTS[self.split], _DEFAULT_SIZE, _DEFAULT_SEED)
        return _EXPECTED[self.split] if self == defaults else None


def _data_root(data_root: str | None) -> Path:
    if data_root:
        return Path(data_root).expanduser()
    if os.environ.get("MMSPECTRAL_DATA"):
        return Path(os.environ["MMSPECTRAL_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mmspectral"


def _draw(settings: _Settings, folder: Path) -> str:
    """Write images and annotations into an empty folder and return the hash of their content.

    The hash covers decoded pixels and not files, as versions of zlib compress differently.
    """
    (folder / settings.images).mkdir(parents=True)
    (folder / settings.annotations).parent.mkdir()
    digest = hashlib.sha256()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(settings.num_images):
        split_index = list(_DEFAULT_COUNTS).index(settings.split)
        pixels, drawn = render(settings.seed, split_index, index, settings.image_size, settings.colour_cue)
        digest.update(pixels.tobytes())
        name, size = f"{index + 1:012d}.png", settings.image_size
        images.append({"id": index + 1, "file_name": name, "width": size, "height": size})
        path = folder / settings.images / name
        if not cv2.imwrite(str(path), np.ascontiguousarray(pixels[..., ::-1])):
            raise OSError(f"OpenCV could not write {path}; check that the disk is not full.")
        for annotation in drawn:
            annotations.append({"id": len(annotations) + 1, "image_id": index + 1, **annotation})
    content = {
        "info": {"description": "mmspectral shapes", "version": str(settings.version)},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES)],
    }
    encoded = json.dumps(content, separators=(",", ":")).encode()
    digest.update(encoded)
    (folder / settings.annotations).write_bytes(encoded)
    return digest.hexdigest()


def _file_state(settings: _Settings, folder: Path) -> dict[str, Any]:
    """Return what is cheap to compare at each start: hash of the annotations, number and bytes of the images."""
    sizes = [entry.stat().st_size for entry in os.scandir(folder / settings.images)]
    annotations = hashlib.sha256((folder / settings.annotations).read_bytes()).hexdigest()
    return dict(annotations_sha256=annotations, image_files=len(sizes), image_bytes=sum(sizes))


def _damage(settings: _Settings, folder: Path) -> str | None:
    """Say what is wrong with a written set, or return None."""
    try:
        manifest, state = json.loads((folder / _MANIFEST).read_text()), _file_state(settings, folder)
    except (OSError, ValueError) as error:
        return str(error)
    if settings.expected_hash not in (None, manifest.get("sha256")):
        return f"{_MANIFEST} has not the published content hash"
    changed = [name for name, value in state.items() if manifest.get(name) != value]
    return f"{', '.join(changed)} differ from {_MANIFEST}" if changed else None


def _write(settings: _Settings, folder: Path) -> None:
    """Draw the set beside its place and rename it in one step. The caller holds the lock.

    A writer that was killed leaves only the partial folder, which the next one removes.
    """
    partial = folder.with_name(folder.name + ".partial")
    discarded = folder.with_name(folder.name + ".discarded")
    for leftover in (partial, discarded):
        if leftover.exists():
            shutil.rmtree(leftover)
    sha256 = _draw(settings, partial)
    if settings.expected_hash not in (None, sha256):
        shutil.rmtree(partial)
        raise RuntimeError(
            f"The default shapes set came out with content hash {sha256} instead of {settings.expected_hash}: "
            f"numpy {np.__version__} or OpenCV {cv2.__version__} draws it differently, so results would not compare "
            "with published ones. Install other versions of these, or pass seed=1 for a set that is not checked."
        )
    manifest = {"sha256": sha256, **_file_state(settings, partial)}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    if folder.exists():
        os.replace(folder, discarded)
    os.replace(partial, folder)
    shutil.rmtree(discarded, ignore_errors=True)


def _provide(settings: _Settings, folder: Path) -> None:
    """Make sure that the set is in its folder, complete; safe from several processes at once."""
    if _damage(settings, folder) is None:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Processes that come second wait here and then find the finished set.
        with FileLock(folder.with_name(folder.name + ".lock")):
            damage = _damage(settings, folder)
            if damage is None:
                return
            if folder.exists():
                print_log(f"Drawing {folder} again, as it is damaged: {damage}.", "current", logging.WARNING)
            else:
                print_log(f"Drawing {settings.num_images} images into {folder}.", logger="current")
            _write(settings, folder)
    except OSError as error:
        raise OSError(
            f"The shapes set cannot be written to {folder}: {error}. "
            "Set the environment variable MMSPECTRAL_DATA, or data_root in the config, to a folder you may write to."
        ) from error


@DATASETS.register_module()
class ShapesDataset(CocoDataset):
    """Circles, squares, triangles and stars with boxes and masks, drawn on first use.

    A set to try a detector on without a download: textured backgrounds, occlusion, COCO's three size ranges (at the
    default ``image_size``), crowd regions as RLE and some images without objects. It is the same, pixel for pixel, on
    every machine; the default sets are checked by a hash.

    Each split lies in a folder of its own, whose name holds all settings, in COCO's layout. It is written when
    annotations are first loaded, under a lock and renamed in one step, so that several processes may start at once. A
    damaged folder is logged and drawn again, so keep no changes of your own in it.

    In test mode ``metainfo['ann_file']`` names the annotations for :class:`mmspectral.evaluation.CocoMetric`; otherwise
    it is left out, as checkpoints store the metainfo of the training set.

    Args:
        ann_file: Other annotations, absolute or relative to the folder.
        data_root: Where the folders of all splits lie. By default ``$MMSPECTRAL_DATA``, else
            ``$XDG_CACHE_HOME/mmspectral``, else ``~/.cache/mmspectral``.
        data_prefix: Other image folder, as ``dict(img=...)``.
        split: ``"train"`` or ``"val"``.
        num_images: By default 400 for ``"train"`` and 100 for ``"val"``.
        image_size: Side of the square images in pixels, at least 64.
        seed: Seed of the drawing.
        colour_cue: Whether each class has colours of its own. Without, colour says
            nothing of the class, which is much harder to learn.
        **kwargs: Passed to :class:`mmdet.datasets.CocoDataset`.

    Raises:
        ValueError: An argument is out of range.
        OSError: The folder cannot be written.
        RuntimeError: A default set came out different from the published one.
    """

    METAINFO = {
        "classes": CLASSES,
        "palette": [(220, 20, 60), (0, 130, 200), (60, 180, 75), (255, 165, 0)],
    }

    def __init__(
        self,
        ann_file: str = "",
        data_root: str | None = None,
        data_prefix: dict | None = None,
        split: str = "train",
        num_images: int | None = None,
        image_size: int = _DEFAULT_SIZE,
        seed: int = _DEFAULT_SEED,
        colour_cue: bool = True,
        **kwargs,
    ) -> None:
        self._settings = _Settings.of(split, num_images, image_size, seed, colour_cue)
        self._folder = _data_root(data_root) / self._settings.folder_name
        super().__init__(
            ann_file=ann_file or self._settings.annotations,
            data_root=str(self._folder),
            data_prefix={"img": self._settings.images} if data_prefix is None else data_prefix,
            **kwargs,
        )

    @property
    def metainfo(self) -> dict:
        """Classes and palette; in test mode also ``ann_file``."""
        metainfo = super().metainfo
        if self.test_mode:
            metainfo["ann_file"] = self.ann_file
        return metainfo

    def load_data_list(self) -> list[dict]:
        """Write the set if it is absent and load its annotations."""
        _provide(self._settings, self._folder)
        return super().load_data_list()

"""A generated set on disk: a file a batch while it grows, then one ``.npz`` for the ADM suite.

A set belongs to weights and settings, whose hash is its key; one of another key in the same place
is discarded, never used. Every batch is written aside and renamed, so that a set which was
interrupted at any moment goes on with what is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from moh import distribution
from moh.errors import RunError
from moh.evaluation.image_sets import ARRAY, ImageSource, NpzImages

SHARDS = "samples"
EXPORT = "samples.npz"
RECORD = "samples.json"  # of the .npz
SETTINGS = "set.json"  # of the shards


class SampleSet(ImageSource):
    """Images of one model under one protocol, by number.

    Args:
        folder: the run's; ``samples/`` and ``samples.npz`` lie in it.
        settings: everything that a pixel depends on.
        images: how many in all.
        batch: images in a shard, the last one the rest.
        shape: of an image (C, H, W).
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        images: int,
        batch: int,
        shape: tuple[int, int, int],
    ) -> None:
        self.label = "samples"
        self.folder, self.shape = folder, shape
        self.shards, self.npz = folder / SHARDS, folder / EXPORT
        self.settings = {**settings, "images": images, "batch": batch, "shape": list(shape)}
        self.batch = batch
        self._images = images
        self._export: NpzImages | None = None

    def __len__(self) -> int:
        return self._images

    def fingerprint(self) -> str:
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def num_batches(self) -> int:
        """Shards of the whole set."""
        return -(-len(self) // self.batch)

    def numbers(self, index: int) -> range:
        """Image numbers of a batch."""
        return range(index * self.batch, min((index + 1) * self.batch, len(self)))

    def prepare(self, keep_npz: bool) -> list[int]:
        """Make room for the set and say which batches it lacks; all processes together.

        Args:
            keep_npz: whether an ``.npz`` will be written beside the shards.

        Raises:
            RunError: not enough room on the disk.
        """
        return distribution.on_main(lambda: self._prepare(keep_npz))

    def _prepare(self, keep_npz: bool) -> list[int]:
        if _key(self.folder / RECORD) != self.fingerprint():
            (self.folder / RECORD).unlink(missing_ok=True)
            self.npz.unlink(missing_ok=True)
        if _key(self.shards / SETTINGS) != self.fingerprint():
            shutil.rmtree(self.shards, ignore_errors=True)
        if self.exported:
            return []
        missing = [index for index in range(self.num_batches) if not self._has(index)]
        self._claim(len(missing) / self.num_batches + keep_npz)
        return missing

    def _claim(self, sets: float) -> None:
        """Take the place, if there is room for so many sets."""
        needed = sets * len(self) * int(np.prod(self.shape))
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise RunError(
                f"{len(self):,} samples need {needed / 1e9:.1f} GB in {self.folder}, "
                f"{free / 1e9:.1f} GB are free"
            )
        self.shards.mkdir(exist_ok=True)
        record = {"key": self.fingerprint(), "settings": self.settings}
        _write(self.shards / SETTINGS, json.dumps(record, indent=1).encode())

    @property
    def exported(self) -> bool:
        """True if the whole set lies in the ``.npz``."""
        if self._export is None and _key(self.folder / RECORD) == self.fingerprint():
            self._export = NpzImages(self.npz) if self.npz.is_file() else None
        return self._export is not None

    def _path(self, index: int) -> Path:
        return self.shards / f"{index:06d}.safetensors"

    def _has(self, index: int) -> bool:
        try:
            with safe_open(self._path(index), "pt") as shard:
                shape = shard.get_slice("images").get_shape()
        except (OSError, SafetensorError):
            return False
        return list(shape) == [len(self.numbers(index)), *self.shape]

    def write(self, index: int, images_BCHW: Tensor, counts: Mapping[str, Tensor]) -> None:
        """Keep a batch.

        Args:
            index: of the batch.
            images_BCHW: uint8.
            counts: what was counted of its images.
        """
        _write(self._path(index), save({"images": images_BCHW.contiguous(), **counts}))

    def counts(self, index: int) -> dict[str, Tensor]:
        """What :meth:`write` was given with a batch."""
        with self._open(index) as shard:
            names = [name for name in shard.keys() if name != "images"]  # noqa: SIM118
            return {name: shard.get_tensor(name) for name in names}

    def _rows(self, index: int, first: int, last: int) -> Tensor:
        with self._open(index) as shard:
            return shard.get_slice("images")[first:last]

    @contextmanager
    def _open(self, index: int) -> Iterator[Any]:
        try:
            with safe_open(self._path(index), "pt") as shard:
                yield shard
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot read {self._path(index)}: {error}") from None

    def read(self, start: int, stop: int) -> Tensor:
        if self.exported:
            assert self._export is not None
            return self._export.read(start, stop)
        parts = []
        for index in range(start // self.batch, -(-stop // self.batch)):
            numbers = self.numbers(index)
            first, last = max(start, numbers.start), min(stop, numbers.stop)
            parts.append(self._rows(index, first - numbers.start, last - numbers.start))
        return torch.cat(parts)

    def export(self, extra: Mapping[str, Any]) -> None:
        """Write the ``.npz`` and drop the shards; on the main process, the set being whole.

        Args:
            extra: what is said of the set beside its settings.
        """
        if not self.exported:
            height, width = self.shape[1:]
            aside = self.npz.with_name(f".{EXPORT}.tmp")
            try:
                with (
                    ZipFile(aside, "w", ZIP_STORED) as archive,
                    archive.open(f"{ARRAY}.npy", "w", force_zip64=True) as array,
                ):
                    header = {
                        "descr": "|u1",
                        "fortran_order": False,
                        "shape": (len(self), height, width, 3),
                    }
                    np.lib.format.write_array_header_1_0(array, header)
                    for index in range(self.num_batches):
                        images = self._rows(index, 0, self.batch).expand(-1, 3, -1, -1)
                        array.write(images.movedim(1, -1).contiguous().numpy().tobytes())
                os.replace(aside, self.npz)
            finally:
                aside.unlink(missing_ok=True)
            record = {"key": self.fingerprint(), "settings": self.settings, **extra}
            _write(self.folder / RECORD, json.dumps(record, indent=1).encode())
        self.discard_shards()

    def discard_shards(self) -> None:
        """Remove what the scores need no more."""
        shutil.rmtree(self.shards, ignore_errors=True)

    def record(self) -> dict[str, Any]:
        """What lies beside the ``.npz``: ``key``, ``settings`` and what :meth:`export` got."""
        return json.loads((self.folder / RECORD).read_text())


def open_samples(folder: Path) -> ImageSource:
    """The whole set that a run folder holds.

    Raises:
        RunError: none, or one that is not finished.
    """
    if (folder / EXPORT).is_file() and (folder / RECORD).is_file():
        whole = NpzImages(folder / EXPORT)
        whole.label = folder.name
        return whole
    try:
        settings = json.loads((folder / SHARDS / SETTINGS).read_text())["settings"]
    except (OSError, ValueError, KeyError):
        raise RunError(
            f"{folder} holds no samples: evaluate the run with eval.save_samples=true"
        ) from None
    images, batch, shape = (settings.pop(key) for key in ("images", "batch", "shape"))
    found = SampleSet(folder, settings, images, batch, tuple(shape))
    lacking = sum(not found._has(index) for index in range(found.num_batches))
    if lacking:
        raise RunError(
            f"{folder} lacks {lacking} of {found.num_batches} batches of samples: "
            "start its evaluation again, it goes on"
        )
    found.label = folder.name
    return found


def weights_hash(modules: Sequence[nn.Module]) -> str:
    """SHA-256 of every parameter and buffer, by name."""
    digest = hashlib.sha256()
    for module in modules:
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy())
    return digest.hexdigest()


def _key(path: Path) -> str | None:
    try:
        return json.loads(path.read_text())["key"]
    except (OSError, ValueError, KeyError):
        return None


def _write(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)

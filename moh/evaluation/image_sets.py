"""Sets of pictures that scores are made of: a folder, an ``.npz``, tensors; read piece by piece."""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from moh.data.listing import PICTURES, files_under, say_left_out
from moh.data.pixels import open_picture
from moh.errors import RunError

ARRAY = "arr_0"  # the name that ADM's suite reads pictures from
DECODERS = 8  # pictures decoded at a time


class ImageSource(ABC):
    """Pictures of one size by number.

    Attributes:
        label: what messages and protocols call the set.
    """

    label: str

    @abstractmethod
    def __len__(self) -> int:
        """Pictures in the set."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Pictures ``start`` to ``stop - 1``, uint8 (B, 1 or 3, H, W).

        Raises:
            RunError: one cannot be read.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """The same for the same pictures, another one for others."""


class TensorImages(ImageSource):
    """Pictures in memory, uint8 (N, C, H, W)."""

    def __init__(self, images_NCHW: Tensor, label: str, fingerprint: str) -> None:
        self.label = label
        self._images, self._fingerprint = images_NCHW, fingerprint

    def __len__(self) -> int:
        return len(self._images)

    def read(self, start: int, stop: int) -> Tensor:
        return self._images[start:stop]

    def fingerprint(self) -> str:
        return self._fingerprint


class FolderImages(ImageSource):
    """The pictures of a folder as RGB, in order of name; of its subfolders if it has none itself.

    Decoded by :func:`moh.data.pixels.open_picture`, as training decodes them: alpha is dropped.

    Raises:
        RunError: no pictures.
    """

    def __init__(self, folder: Path) -> None:
        self.label = folder.name or str(folder)
        self.folder = folder
        try:
            pictures, others = files_under(folder)
        except OSError as error:
            raise RunError(f"cannot read folder {folder}: {error.strerror}") from None
        own = [path for path in pictures if Path(path).parent == folder]
        self.paths = sorted(map(Path, own or pictures))
        if not self.paths:
            raise RunError(f"{folder} holds no pictures ({', '.join(sorted(PICTURES))})")
        deeper = [path for path in pictures if own and Path(path).parent != folder]
        for names, why in ((others, "not pictures"), (deeper, "in subfolders")):
            say_left_out(folder, [os.path.relpath(path, folder) for path in names], why)
        self._size: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, start: int, stop: int) -> Tensor:
        paths = self.paths[start:stop]
        if self._size is None:
            self._size = _decode(self.paths[0]).shape
        with ThreadPoolExecutor(min(DECODERS, os.cpu_count() or 1)) as pool:
            images = list(pool.map(_decode, paths))
        for path, image in zip(paths, images, strict=True):
            if image.shape != self._size:
                raise RunError(
                    f"{path} is {_pixels(image.shape)}, {self.paths[0].name} "
                    f"{_pixels(self._size)}: a set must be of one size; crop and resize it first"
                )
        return torch.from_numpy(np.stack(images)).movedim(-1, 1)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.paths:
            stat = path.stat()
            entry = (str(path.relative_to(self.folder)), stat.st_size, stat.st_mtime_ns)
            digest.update(repr(entry).encode())
        return digest.hexdigest()


class NpzImages(ImageSource):
    """``arr_0`` of an ``.npz`` in the form of ADM's suite: uint8 (N, H, W, 3).

    The array is streamed, never held: 50,000 pictures of 256 pixels are 9.8 GB. Reading in
    ascending order is cheap; a step back starts again at the beginning.

    Raises:
        RunError: no such archive, no such array, or one of another form.
    """

    def __init__(self, path: Path) -> None:
        self.label, self.path = path.name, path
        names = array_names(path)
        if ARRAY not in names:
            raise RunError(f"{path} has no {ARRAY}; it holds {', '.join(names) or 'nothing'}")
        self._stream: IO[bytes] | None = None
        self._next = 0
        with _readable(path):
            self._open()

    def _open(self) -> None:
        """(Re)start the stream at the first picture."""
        # The handle lives as long as the member that is read from it.
        self._stream = ZipFile(self.path).open(f"{ARRAY}.npy")  # noqa: SIM115
        self._next = 0
        version = np.lib.format.read_magic(self._stream)
        read = np.lib.format.read_array_header_1_0
        shape, fortran, dtype = (
            read if version == (1, 0) else np.lib.format.read_array_header_2_0
        )(self._stream)
        if len(shape) != 4 or shape[-1] not in (1, 3) or dtype != np.uint8 or fortran:
            raise RunError(
                f"{ARRAY} of {self.path} is {dtype} {shape}: pictures are uint8 (N, H, W, 3)"
            )
        if 0 in shape:
            raise RunError(f"{ARRAY} of {self.path} is {shape}: it holds no pictures")
        self._shape: tuple[int, ...] = shape

    def __len__(self) -> int:
        return self._shape[0]

    def read(self, start: int, stop: int) -> Tensor:
        with _readable(self.path):
            if start < self._next or self._stream is None:
                self._open()
            assert self._stream is not None
            size = int(np.prod(self._shape[1:]))
            while self._next < start:  # piece by piece, to hold no more than one
                self._take(min(start - self._next, 64), size)
            count = min(stop, len(self)) - start
            pixels = np.frombuffer(bytearray(self._take(count, size)), np.uint8)
        return torch.from_numpy(pixels.reshape(count, *self._shape[1:])).movedim(-1, 1)

    def _take(self, count: int, size: int) -> bytes:
        assert self._stream is not None
        data = self._stream.read(count * size)
        if len(data) != count * size:
            raise EOFError(f"ends after picture {self._next + len(data) // size}")
        self._next += count
        return data

    def fingerprint(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def open_images(path: Path) -> ImageSource:
    """A folder of pictures or an ``.npz``.

    Raises:
        RunError: neither.
    """
    if path.is_dir():
        return FolderImages(path)
    if path.suffix == ".npz" and path.is_file():
        return NpzImages(path)
    what = "is neither a folder of pictures nor an .npz" if path.exists() else "does not exist"
    raise RunError(f"{path} {what}")


def array_names(path: Path) -> list[str]:
    """Names of the arrays in an ``.npz``.

    Raises:
        RunError: it cannot be read.
    """
    with _readable(path), ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def small_arrays(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Arrays of an ``.npz`` that fit in memory, as float64.

    Raises:
        RunError: it cannot be read, or an array holds no numbers.
    """
    with _readable(path), np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name].astype(np.float64)) for name in names}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Tell what is wrong with an archive in one line."""
    try:
        yield
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise RunError(f"cannot read {path}: {reason}") from None


def _decode(path: Path) -> np.ndarray:
    """RGB (H, W, 3) uint8."""
    return np.asarray(open_picture(path))


def _pixels(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]}"

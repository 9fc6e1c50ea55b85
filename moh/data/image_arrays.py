"""The ``.npz`` of labelled images that fit in memory: what it must hold, checked when read."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from moh.data.classes import check_labels
from moh.errors import RunError

REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
NAMES = "class_names"  # may be missing


@dataclass(frozen=True)
class ImageArrays:
    """The arrays of such a file.

    Attributes:
        train, test: uint8 (n, S, S, C), C 1 or as asked for.
        train_labels, test_labels: int64 (n,), in 0..classes-1.
        class_names: one a class; None where the file names none.
        sha256: of the file.
    """

    train: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.int64]
    test: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...] | None
    sha256: str


def read_arrays(path: Path, where: str, channels: int, num_classes: int) -> ImageArrays:
    """Read such a file and compare it with the model.

    Args:
        where: what to call it in a message.
        channels: of the model's input; images of one channel fit any.
        num_classes: of the model. Each class needs a training image.

    Raises:
        RunError: it cannot be read, or does not fit; one line.
    """
    arrays, sha256 = _load(path, where)
    parts: dict[str, Any] = {}
    for split in ("train", "test"):
        images = _check_images(arrays[f"{split}_images"], f"{where}: {split}_images", channels)
        labels = arrays[f"{split}_labels"]
        named = f"{where}: {split}_labels"
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise RunError(
                f"{named} are {labels.dtype} {labels.shape}; they must be whole numbers (n,), one "
                "class an image (not one-hot)"
            )
        if len(labels) != len(images):
            raise RunError(f"{named} are {len(labels):,}, the images {len(images):,}")
        check_labels(labels.tolist(), num_classes, named, all_present=split == "train")
        parts |= {split: images, f"{split}_labels": labels.astype(np.int64)}
    names = _check_names(arrays.get(NAMES), f"{where}: {NAMES}", num_classes)
    return ImageArrays(**parts, class_names=names, sha256=sha256)


def _load(path: Path, where: str) -> tuple[Mapping[str, npt.NDArray[Any]], str]:
    needed = f"needs {', '.join(REQUIRED)}, and may have {NAMES}"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RunError(f"{where}: cannot read images {path}: {error.strerror}") from None
    arrays: dict[str, npt.NDArray[Any]] = {}
    name = ""
    try:
        opened = np.load(io.BytesIO(raw), allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError("a single array")
        for name in (*REQUIRED, NAMES):
            if name in opened:
                arrays[name] = opened[name]
    except (ValueError, KeyError, OSError, EOFError, BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0]
        if "Object arrays" in reason:
            reason = f"{name} holds Python objects, which are not read: they could run code"
        raise RunError(f"{where}: {path} is not an image set: {needed} ({reason})") from None
    if lacking := [name for name in REQUIRED if name not in arrays]:
        raise RunError(
            f"{where}: {path} is not an image set: {needed} ({', '.join(lacking)} missing)"
        )
    return arrays, hashlib.sha256(raw).hexdigest()


def _check_images(images: npt.NDArray[Any], where: str, channels: int) -> npt.NDArray[np.uint8]:
    """(n, S, S) or (n, S, S, C) uint8 as (n, S, S, C)."""
    if images.dtype != np.uint8:
        raise RunError(f"{where} are {images.dtype}; they must be uint8, 0 to 255")
    if images.ndim not in (3, 4):
        raise RunError(f"{where} have shape {images.shape}; it must be (n, S, S) or (n, S, S, C)")
    if 0 in images.shape:
        raise RunError(f"{where} are empty: shape {images.shape}")
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[-1] not in (1, channels):
        raise RunError(
            f"{where} have {images.shape[-1]} channels (shape {images.shape}); data.channels is "
            f"{channels}, they must have 1 or {channels}, last"
        )
    if images.shape[1] != images.shape[2]:
        raise RunError(f"{where} are {images.shape[2]}x{images.shape[1]}; they must be square")
    return images


def _check_names(
    names: npt.NDArray[Any] | None, where: str, num_classes: int
) -> tuple[str, ...] | None:
    if names is None:
        return None
    if names.ndim != 1 or names.dtype.kind != "U":
        raise RunError(f"{where} are {names.dtype} {names.shape}; they must be strings (classes,)")
    listed: list[str] = names.tolist()
    if len(listed) != num_classes:
        raise RunError(f"{where} are {len(listed)}, but model.num_classes is {num_classes}")
    if twice := [name for name in listed if listed.count(name) > 1]:
        raise RunError(f"{where} have {twice[0]!r} more than once")
    return tuple(listed)

"""VAE latents of labelled images, cached in safetensors shards by ``scripts/cache_latents.py``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moh.config import ImagesConfig
from moh.data import imagenet
from moh.data.classes import check_labels
from moh.data.encoding import draw, flipped, posterior_noise, require_plain_scale
from moh.data.order import ShuffledOrder
from moh.data.reading import ReadAhead
from moh.errors import RunError

INDEX = "index.json"
METADATA = "moh"  # one entry, since the library writes several in any order
DTYPES = {"float32": "F32", "float16": "F16"}


@dataclass(frozen=True)
class LatentIndex:
    """What a cache holds: everything that decides a number in it.

    Attributes:
        classes: folder names, in order of their label.
        images: in the folder, those that could not be read included.
        images_sha256: of their paths and classes.
        pixels: on a side of the crop.
        latent: (C, H, W).
        vae: where it was loaded from, for the reader.
        vae_sha256: of its weights and scale.
        scale, shift: of the VAE.
        precision: of its convolutions on a GPU.
        dtype: of the stored moments.
        shard_images: images of a shard before those that could not be read are left out.
    """

    classes: list[str]
    images: int
    images_sha256: str
    pixels: int
    latent: list[int]
    vae: str
    vae_sha256: str
    scale: float
    shift: float
    precision: str
    dtype: str
    shard_images: int
    layout: int = 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all of it but the VAE's place."""
        what = {key: value for key, value in asdict(self).items() if key != "vae"}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    @property
    def num_shards(self) -> int:
        """Files of the cache."""
        return -(-self.images // self.shard_images)

    def shard_range(self, number: int) -> range:
        """Places in the folder's list of the images of a shard."""
        first = number * self.shard_images
        return range(first, min(first + self.shard_images, self.images))

    @classmethod
    def read(cls, folder: Path) -> LatentIndex:
        """The index of a cache.

        Raises:
            RunError: there is none, or it is not one; one line.
        """
        path = folder / INDEX
        try:
            return cls(**json.loads(path.read_text()))
        except OSError as error:
            raise RunError(
                f"cannot read {path}: {error.strerror}; scripts/cache_latents.py makes a cache"
            ) from None
        except (ValueError, TypeError) as error:
            raise RunError(f"{path} is not the index of a latent cache: {error}") from None


def shard_path(folder: Path, number: int) -> Path:
    """File of a shard."""
    return folder / f"train-{number:05d}.safetensors"


class Shard:
    """One file: ``moments`` (n, 2 flips, 2, C, H, W), mean then standard deviation; ``labels``.

    Memory-mapped: a sample costs the bytes of its own moments.

    Raises:
        RunError: missing, truncated, or of another cache; one line that names it.
    """

    def __init__(self, folder: Path, index: LatentIndex, number: int) -> None:
        path = shard_path(folder, number)
        if not path.is_file():
            raise RunError(
                f"{path} is missing (shard {number + 1} of {index.num_shards}): run "
                "scripts/cache_latents.py again, it goes on where it stopped"
            )
        try:
            file = safe_open(path, "np")
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            self._moments = file.get_slice("moments")
            self.labels: npt.NDArray[np.int64] = file.get_tensor("labels")
            shape, dtype = self._moments.get_shape(), self._moments.get_dtype()
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(
                f"{path} is damaged ({error}); delete it and run scripts/cache_latents.py again"
            ) from None
        if self.labels.ndim != 1 or self.labels.dtype != np.int64:
            raise RunError(
                f"{path}: labels are {self.labels.dtype} {self.labels.shape}, not int64 (n,)"
            )
        wanted = [len(self.labels), 2, 2, *index.latent], DTYPES[index.dtype]
        if about.get("index") != index.fingerprint or about.get("shard") != number:
            raise RunError(f"{path} is of another cache than {folder / INDEX}")
        if (shape, dtype) != wanted:
            raise RunError(f"{path} holds {dtype} {shape}, not {wanted[1]} {wanted[0]}")
        self.path, self.sha256 = path, about["sha256"]
        self.skipped: dict[str, str] = about["skipped"]

    def __len__(self) -> int:
        return len(self.labels)

    def moments(self, row: int, flip: int) -> npt.NDArray[np.floating[Any]]:
        """(2, C, H, W)."""
        return self._moments[row, flip]

    def all_moments(self) -> npt.NDArray[np.floating[Any]]:
        """Everything, read into memory."""
        return self._moments[:]


class CachedLatents:
    """Training samples from a cache: a flip and a draw from the posterior, by sample number.

    Attributes:
        class_names: folder names, in order.
        known_names: the same, None where they are numbers.
        fingerprint: of the cache's index and the images that are not in it.
        scale, shift: of the VAE.
    """

    num_test = 0

    def __init__(self, config: ImagesConfig, num_classes: int) -> None:
        require_plain_scale(config)
        if config.root is None:
            raise RunError(
                f"data.root is not set: {config.name} needs the folder that "
                "scripts/cache_latents.py wrote"
            )
        folder = Path(config.root)
        index = self.index = LatentIndex.read(folder)
        if list(index.latent) != [config.channels, config.size, config.size]:
            raise RunError(
                f"{folder} holds latents of {'x'.join(map(str, index.latent))}, the data are "
                f"{config.channels}x{config.size}x{config.size} (data.channels, data.size)"
            )
        names = tuple(index.classes)
        counted = f"{folder} has {len(names)} classes"
        imagenet.check_names(names, config.name, num_classes, counted)
        self.config = config
        self.scale, self.shift = index.scale, index.shift
        self.class_names = names
        self.known_names = imagenet.known_names(names, config.name, num_classes)
        self._shards = [Shard(folder, index, i) for i in range(index.num_shards)]
        # Image i is in the last shard whose first image is not after it.
        self._first = np.cumsum([0, *(len(shard) for shard in self._shards)])
        skipped = sorted(name for shard in self._shards for name in shard.skipped)
        self.fingerprint = hashlib.sha256(repr((index.fingerprint, skipped)).encode()).hexdigest()
        if not self.num_train:
            raise RunError(f"{folder} holds no image: none of {index.images} could be read")
        labels = [label for shard in self._shards for label in shard.labels.tolist()]
        check_labels(labels, num_classes, f"data.root={folder}: labels", all_present=True)
        self._ahead: ReadAhead[dict[str, Tensor]] | None = None
        self._order: ShuffledOrder | None = None

    @property
    def num_train(self) -> int:
        """Training images."""
        return int(self._first[-1])

    def order(self, seed: int) -> ShuffledOrder:
        """Order of the training images, with one uniform number each for the flip."""
        return ShuffledOrder(self.num_train, seed, draws=1)

    def train_batch(self, order: ShuffledOrder, first: int, count: int) -> dict[str, Tensor]:
        """Training samples ``first`` to ``first + count - 1``.

        Returns:
            ``images`` float32 (count, C, size, size), scaled; ``labels`` int64 (count,).
        """
        if self._ahead is None or self._order is not order:
            self._ahead, self._order = ReadAhead(partial(self._read, order)), order
        return self._ahead(first, count)

    def _read(self, order: ShuffledOrder, first: int, count: int) -> dict[str, Tensor]:
        indices, uniform = order.take(first, count)
        flips = flipped(uniform, self.config.flip).tolist()
        moments, labels, noise = [], [], []
        for number, image, flip in zip(
            range(first, first + count), indices.tolist(), flips, strict=True
        ):
            shard, row = self._place(image)
            moments.append(shard.moments(row, flip))
            labels.append(shard.labels[row])
            noise.append(posterior_noise(order.seed, number, tuple(self.index.latent)))
        stacked = torch.from_numpy(np.stack(moments)).float()
        return {
            "images": draw(stacked, torch.stack(noise), self.scale, self.shift),
            "labels": torch.from_numpy(np.array(labels, dtype=np.int64)),
        }

    def _place(self, image: int) -> tuple[Shard, int]:
        shard = int(np.searchsorted(self._first, image, side="right")) - 1
        return self._shards[shard], image - int(self._first[shard])


def payload_sha256(moments: npt.NDArray[Any], labels: npt.NDArray[np.int64]) -> str:
    """What a shard's metadata say of its numbers."""
    digest = hashlib.sha256(np.ascontiguousarray(moments).data)
    digest.update(np.ascontiguousarray(labels).data)
    return digest.hexdigest()


def skipped_images(shards: Sequence[Shard]) -> dict[str, str]:
    """Paths that are not in a cache -> why, in the folder's order."""
    return {path: why for shard in shards for path, why in shard.skipped.items()}

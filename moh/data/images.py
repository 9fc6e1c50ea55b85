"""Labelled images that fit in memory: the embedded Fashion-MNIST subset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moh.config import ImagesConfig
from moh.data.classes import numbered, real_names
from moh.data.image_arrays import read_arrays
from moh.data.order import ShuffledOrder
from moh.distribution import share_of
from moh.errors import RunError

EMBEDDED = Path(__file__).parent / "embedded" / "fashion_mnist_12k.npz"

CLASS_NAMES = (
    "T-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


@dataclass(frozen=True)
class ImageSet:
    """Training and test images with their classes.

    Attributes:
        train, test: uint8 (n, C, size, size).
        train_labels, test_labels: int64 (n,).
        class_names: one a class; numbers where the file names none.
        fingerprint: SHA-256 of the file they came from.
        sizes: pixels on a side in the file, of both.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    fingerprint: str
    config: ImagesConfig
    sizes: tuple[int, int]

    @classmethod
    def load(cls, config: ImagesConfig, num_classes: int) -> ImageSet:
        """Read an ``.npz`` of the form of the embedded one and resize it to ``config.size``.

        Args:
            num_classes: of the model.

        Raises:
            RunError: no such file, not of the form, or not fit for the model; one line.
        """
        if config.form != "npz":
            raise RunError(f"data {config.name}: this task cannot train on data.form {config.form}")
        path = Path(config.root) if config.root else EMBEDDED
        where = f"data.root={config.root}" if config.root else f"data {config.name}"
        found = read_arrays(path, where, config.channels, num_classes)
        names = found.class_names if config.root else CLASS_NAMES
        return cls(
            train=_resize(torch.from_numpy(found.train), config),
            train_labels=torch.from_numpy(found.train_labels),
            test=_resize(torch.from_numpy(found.test), config),
            test_labels=torch.from_numpy(found.test_labels),
            class_names=names or numbered(num_classes),
            fingerprint=found.sha256,
            config=config,
            sizes=(found.train.shape[1], found.test.shape[1]),
        )

    @property
    def known_names(self) -> tuple[str, ...] | None:
        """Class names that the data state; None where they number their classes."""
        return real_names(self.class_names)

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 images to float32 with the configured mean and standard deviation."""
        mean = torch.tensor(self.config.mean).view(1, -1, 1, 1)
        std = torch.tensor(self.config.std).view(1, -1, 1, 1)
        return (images_BCHW.float() / 255 - mean) / std

    @property
    def num_train(self) -> int:
        """Training images."""
        return len(self.train)

    @property
    def num_test(self) -> int:
        """Test images."""
        return len(self.test)

    @property
    def preparation(self) -> str:
        """What is done to an image, in words."""
        size, stored = self.config.size, self.sizes[1]
        return f"{size} px" if stored == size else f"{stored} px resized to {size} px bilinear"

    @property
    def summary(self) -> dict[str, Any]:
        """Nothing beside what every data set records."""
        return {}

    @property
    def marks(self) -> list[str]:
        """Nothing to be said beside an accuracy on these images."""
        return []

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised test images and their labels in order; of several processes each its share."""
        for start in share_of(range(0, self.num_test, size)):
            part = slice(start, start + size)
            yield self.normalise(self.test[part]), self.test_labels[part]

    def test_samples(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Normalised test images of these numbers and their labels."""
        index = torch.tensor(numbers)
        return self.normalise(self.test[index]), self.test_labels[index]

    def order(self, seed: int) -> ShuffledOrder:
        """Order of the training images, with three uniform numbers each for augmentation."""
        return ShuffledOrder(len(self.train), seed, draws=3)

    def train_batch(self, order: ShuffledOrder, first: int, count: int) -> dict[str, Tensor]:
        """Augmented training samples ``first`` to ``first + count - 1``.

        Returns:
            ``images`` float32 (count, C, size, size), ``labels`` int64 (count,).
        """
        index, uniform = order.take(first, count)
        images = augment(self.train[index], uniform, self.config.crop_padding, self.config.flip)
        return {"images": self.normalise(images), "labels": self.train_labels[index]}


def augment(images_BCHW: Tensor, uniform_B3: Tensor, padding: int, flip: bool) -> Tensor:
    """Random crop of the zero-padded image and random horizontal flip.

    Args:
        images_BCHW: any dtype, (B, C, S, S).
        uniform_B3: three numbers in [0, 1) an image: row, column, flip.
        padding: pixels on each side; 0 for no crop.
        flip: whether half of the images are mirrored.

    Returns:
        (B, C, S, S).
    """
    size = images_BCHW.shape[-1]
    offset_B2 = (uniform_B3[:, :2] * (2 * padding + 1)).long()
    span = torch.arange(size)
    rows_BS = offset_B2[:, :1] + span
    columns_BS = offset_B2[:, 1:] + span
    if flip:
        mirrored = uniform_B3[:, 2:] < 0.5
        columns_BS = torch.where(mirrored, columns_BS.flip(1), columns_BS)
    padded = F.pad(images_BCHW, [padding] * 4)
    batch = torch.arange(len(images_BCHW)).view(-1, 1, 1)
    taken_BSSC = padded.movedim(1, -1)[batch, rows_BS[:, :, None], columns_BS[:, None, :]]
    return taken_BSSC.movedim(-1, 1).contiguous()


def _resize(images_NHWC: Tensor, config: ImagesConfig) -> Tensor:
    """(n, S, S, C) uint8 to (n, channels, size, size) uint8, antialiased; grey fills them all."""
    images = images_NHWC.movedim(-1, 1).expand(-1, config.channels, -1, -1)
    if images.shape[-1] != config.size:
        resized = F.interpolate(
            images.float(), size=config.size, mode="bilinear", antialias=True, align_corners=False
        )
        images = resized.round().clamp(0, 255).to(torch.uint8)
    return images.contiguous()

"""Labelled images in folders, one a class: ImageNet with the paper's augmentation through timm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import Dataset

from moh.config import ClassificationConfig, ImagesConfig
from moh.data.order import ShuffledOrder, stable_seed
from moh.data.readers import FolderReader
from moh.data.validation_images import ValidationImages, common_transform, load, next_batch
from moh.errors import RunError


class RepeatedOrder(ShuffledOrder):
    """Repeated augmentation: each pass shows the first images of a permutation several times.

    A pass has as many samples as a plain one, rounded down to a multiple of 256, as the recipe
    that the paper keeps has it; so with three repeats a third of the images is seen in it.
    """

    def __init__(self, size: int, seed: int, repeats: int) -> None:
        super().__init__(size, seed)
        self.images = size
        self.repeats = repeats
        self.size = size if size < 256 else size // 256 * 256

    def _load(self, epoch: int) -> None:
        if epoch != self._epoch:
            images, self.size = self.size, self.images
            super()._load(epoch)
            self.size = images
            self._permutation = self._permutation.repeat_interleave(self.repeats)[: self.size]
            self._uniform = torch.zeros(self.size, 0)


class _Augmented(Dataset[tuple[Tensor, int]]):
    """Images by (sample number, index), each augmented with the random numbers of its number."""

    def __init__(self, images: FolderReader, transform: Any, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        number, index = key
        with _own_random_numbers(self.seed, number):
            return self.transform(self.images.image(index)), self.images.labels[index]


class FolderImages(ValidationImages):
    """Training and validation images under ``root/train`` and ``root/val``.

    Attributes:
        class_names: folder names, in order.
    """

    def __init__(self, config: ImagesConfig, task: ClassificationConfig, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self._train = FolderReader(Path(config.root or "") / "train")
        if lone := sorted(set(self._train.class_names) ^ set(self.class_names)):
            raise RunError(f"{config.root}: class {lone[0]} is not in both of train/ and val/")
        self._augment = create_transform(
            **common_transform(config),
            is_training=True,
            auto_augment=task.auto_augment,
            color_jitter=0.4,
            hflip=0.5 if config.flip else 0.0,
            re_prob=task.random_erasing,
            re_mode="pixel",
        )
        self._loader: Iterator[tuple[Tensor, Tensor]] | None = None
        self._next = (-1, -1)

    @property
    def fingerprint(self) -> str:
        """Of the lists of images, in order."""
        return self._digest(self._train, self.images)

    @property
    def num_train(self) -> int:
        """Training images."""
        return len(self._train)

    def order(self, seed: int) -> ShuffledOrder:
        """Order of the training images."""
        return RepeatedOrder(self.num_train, seed, self.config.repeats)

    def train_batch(self, order: ShuffledOrder, first: int, count: int) -> dict[str, Tensor]:
        """Augmented training samples ``first`` to ``first + count - 1``.

        Batches that follow each other are read ahead by ``data.workers`` processes.

        Returns:
            ``images`` float32 (count, C, size, size), ``labels`` int64 (count,).
        """
        if self._loader is None or self._next != (first, count):
            data = _Augmented(self._train, self._augment, order.seed)
            self._loader = load(data, _numbered(order, first, count), self.config.workers)
        images, labels = next_batch(self._loader)
        self._next = (first + count, count)
        return {"images": images, "labels": labels}


def _numbered(order: ShuffledOrder, first: int, count: int) -> Iterator[list[tuple[int, int]]]:
    while True:
        indices, _ = order.take(first, count)
        yield list(zip(range(first, first + count), indices.tolist(), strict=True))
        first += count


@contextmanager
def _own_random_numbers(seed: int, number: int) -> Iterator[None]:
    """Seed every stream that an augmentation may draw from, and give them back as they were."""
    own = stable_seed(seed, "augment", number)
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(own)
            random.seed(own)
            np.random.seed(own % 2**32)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

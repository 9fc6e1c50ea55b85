"""Labelled images in folders, one a class: ImageNet with the paper's augmentation through timm."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import Dataset

from moh.config import ClassificationConfig, ImagesConfig
from moh.data.order import ShuffledOrder, stable_seed
from moh.data.readers import FolderReader
from moh.data.reading import Key, LoadAhead
from moh.data.validation_images import ValidationImages, common_transform
from moh.errors import RunError


class RepeatedOrder(ShuffledOrder):
    """Repeated augmentation: each pass shows the first images of a permutation several times.

    A pass has as many samples as a plain one, rounded down to a multiple of 256, as the recipe
    that the paper keeps has it; so with three repeats a third of the images is seen in it.

    The recipe deals the copies of an image to different GPUs: they share an update and no device
    batch, so that mixing never pairs them. Its deal is part of the order here, however many
    devices there are: of each ``block`` samples the first ``block / spread`` are those that its
    first GPU sees.

    Args:
        size: images.
        repeats: times that an image is shown in a pass that shows it.
        block: samples of an update.
        spread: GPUs of the recipe, as far as they divide ``block``; 1 leaves the copies side by
            side.
    """

    def __init__(self, size: int, seed: int, repeats: int, block: int = 1, spread: int = 1) -> None:
        super().__init__(size, seed)
        self.images = size
        self.repeats = repeats
        self.block, self.spread = block, math.gcd(block, spread)
        self.size = size if size < 256 else size // 256 * 256

    def _load(self, epoch: int) -> None:
        if epoch != self._epoch:
            samples, self.size = self.size, self.images
            super()._load(epoch)
            self.size = samples
            shown = self._permutation.repeat_interleave(self.repeats)[:samples]
            whole = samples // self.block * self.block
            dealt = shown[:whole].view(-1, self.block // self.spread, self.spread)
            self._permutation = torch.cat([dealt.transpose(1, 2).flatten(), shown[whole:]])
            self._uniform = torch.zeros(samples, 0)


class _Augmented(Dataset[tuple[Tensor, int]]):
    """Images by (sample number, index), each augmented with the random numbers of its number."""

    def __init__(self, images: FolderReader, transform: Any, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        number, index = key
        image = self.images.image(index)
        with _own_random_numbers(self.seed, number):
            return self.transform(image), self.images.labels[index]


class FolderImages(ValidationImages):
    """Training and validation images under ``root/train`` and ``root/val``.

    Attributes:
        class_names: folder names, in order.
    """

    def __init__(
        self,
        config: ImagesConfig,
        task: ClassificationConfig,
        num_classes: int,
        global_batch: int = 1,
    ) -> None:
        super().__init__(config, num_classes)
        self.global_batch = global_batch
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
        allow_zero_bits(self._augment)
        self._ahead: LoadAhead | None = None
        self._order: ShuffledOrder | None = None

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
        spread = self.config.repeat_spread if self.config.repeats > 1 else 1
        return RepeatedOrder(self.num_train, seed, self.config.repeats, self.global_batch, spread)

    def train_batch(self, order: ShuffledOrder, first: int, count: int) -> dict[str, Tensor]:
        """Augmented training samples ``first`` to ``first + count - 1``.

        The batches after it, as one of several processes asks for them, are read ahead by
        ``data.workers`` processes.

        Returns:
            ``images`` float32 (count, C, size, size), ``labels`` int64 (count,).
        """
        if self._ahead is None or self._order is not order:
            pictures = _Augmented(self._train, self._augment, order.seed)
            self._ahead = LoadAhead(pictures, partial(_numbered, order), self.config.workers)
            self._order = order
        images, labels = self._ahead(first, count)
        return {"images": images, "labels": labels}


def _numbered(order: ShuffledOrder, first: int, count: int) -> list[Key]:
    indices, _ = order.take(first, count)
    return list(zip(range(first, first + count), indices.tolist(), strict=True))


def allow_zero_bits(transform: Any) -> None:
    """Let the posterise operation of timm's policies keep no bit, which gives black.

    timm asks for 0 to 4 bits; Pillow 13 refuses 0, which it took before.
    """
    for step in transform.transforms:
        policies = [getattr(step, "ops", []), *getattr(step, "policy", [])]
        for operation in (operation for policy in policies for operation in policy):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterise


def _posterise(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


@contextmanager
def _own_random_numbers(seed: int, number: int) -> Iterator[None]:
    """Seed every stream that an augmentation may draw from, and give them back as they were."""
    own = stable_seed(seed, "augment", number)
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which spends milliseconds on the streams of devices.
            torch.default_generator.manual_seed(own)
            random.seed(own)
            np.random.seed(own % 2**32)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

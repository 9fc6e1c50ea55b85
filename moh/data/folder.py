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
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

from moh.config import ClassificationConfig, ImagesConfig
from moh.data.order import ShuffledOrder, stable_seed
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


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Images by (sample number, index), each augmented with the random numbers of its number."""

    def __init__(self, folder: ImageFolder, transform: Any, seed: int | None) -> None:
        self.folder, self.transform, self.seed = folder, transform, seed

    def __len__(self) -> int:
        return len(self.folder.samples)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        number, index = key
        path, label = self.folder.samples[index]
        with _own_random_numbers(self.seed, number):
            try:
                return self.transform(self.folder.loader(path)), label
            except (OSError, SyntaxError, ValueError) as error:
                raise RunError(f"cannot read image {path}: {error}") from None


class FolderImages:
    """Training and validation images under ``root/train`` and ``root/val``.

    Attributes:
        class_names: folder names, in order.
        fingerprint: of the file lists; the pictures themselves are not read for it.
    """

    def __init__(self, config: ImagesConfig, task: ClassificationConfig, num_classes: int) -> None:
        self.config = config
        if config.root is None:
            raise RunError(
                f"data.root is not set: {config.name} needs a folder with train/ and val/"
            )
        self._train = _open(Path(config.root) / "train", num_classes)
        self._val = _open(Path(config.root) / "val", num_classes)
        if self._train.classes != self._val.classes:
            other = sorted(set(self._train.classes) ^ set(self._val.classes))[0]
            raise RunError(f"{config.root}: class {other} is not in both of train/ and val/")
        self.class_names = tuple(self._train.classes)
        names = [Path(path).name for f in (self._train, self._val) for path, _ in f.samples]
        self.fingerprint = f"{stable_seed(*names):016x}"
        common = {
            "input_size": (config.channels, config.size, config.size),
            "interpolation": "bicubic",
            "mean": tuple(config.mean),
            "std": tuple(config.std),
        }
        self._augment = create_transform(
            **common,
            is_training=True,
            auto_augment=task.auto_augment,
            color_jitter=0.4,
            hflip=0.5 if config.flip else 0.0,
            re_prob=task.random_erasing,
            re_mode="pixel",
        )
        self._resize = create_transform(**common, is_training=False, crop_pct=0.875)
        self._loader: Iterator[tuple[Tensor, Tensor]] | None = None
        self._next = (-1, -1)

    @property
    def num_train(self) -> int:
        """Training images."""
        return len(self._train.samples)

    @property
    def num_test(self) -> int:
        """Validation images."""
        return len(self._val.samples)

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
            data = _Decoded(self._train, self._augment, order.seed)
            self._loader = self._load(data, _numbered(order, first, count))
        images, labels = _next(self._loader)
        self._next = (first + count, count)
        return {"images": images, "labels": labels}

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Validation images in order: resized so that the crop is 0.875 of the short side."""
        data = _Decoded(self._val, self._resize, None)
        numbers = [(i, i) for i in range(self.num_test)]
        batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        loader = self._load(data, batches)
        for _ in batches:
            yield _next(loader)

    def _load(self, data: _Decoded, batches: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(
            DataLoader(
                data,
                batch_sampler=batches,
                num_workers=self.config.workers,
                # Its own, or the start of a pass would draw from the model's random stream.
                generator=torch.Generator(),
                pin_memory=torch.cuda.is_available(),
            )
        )


def _numbered(order: ShuffledOrder, first: int, count: int) -> Iterator[list[tuple[int, int]]]:
    while True:
        indices, _ = order.take(first, count)
        yield list(zip(range(first, first + count), indices.tolist(), strict=True))
        first += count


def _next(loader: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    try:
        return next(loader)
    except RunError as error:
        # A loading process hands over its whole traceback; the last line is the message.
        raise RunError(str(error).strip().splitlines()[-1].rpartition("RunError: ")[2]) from None
    except RuntimeError as error:
        raise RunError(f"a data loading process died: {str(error).splitlines()[0]}") from None


def _open(folder: Path, num_classes: int) -> ImageFolder:
    try:
        opened = ImageFolder(str(folder))
    except (OSError, FileNotFoundError) as error:
        raise RunError(f"cannot read images in {folder}: {str(error).splitlines()[0]}") from None
    if len(opened.classes) != num_classes:
        raise RunError(
            f"{folder} has {len(opened.classes)} class folders, model.num_classes is {num_classes}"
        )
    return opened


@contextmanager
def _own_random_numbers(seed: int | None, number: int) -> Iterator[None]:
    """Seed every stream that an augmentation may draw from, and give them back as they were."""
    if seed is None:
        yield
        return
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

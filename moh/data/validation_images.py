"""The images that an accuracy is measured on: each read once, prepared as the protocol says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import Dataset

from moh.config import ImagesConfig
from moh.data import imagenet
from moh.data.labelled import Images
from moh.data.listing import LISTED, is_hidden
from moh.data.readers import READERS
from moh.data.reading import load, next_batch
from moh.distribution import share_of
from moh.errors import RunError, some

FOLDERS = ("val", "validation")


class _Prepared(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: Images, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images.image(index)), self.images.labels[index]


class ValidationImages:
    """Validation images in any form of :mod:`moh.data.readers`.

    Attributes:
        class_names: in order of label.
        fingerprint: of names and labels; the pictures themselves are not read for it.

    Raises:
        RunError: no images, another number of classes than the model's, or other ones.
    """

    def __init__(self, config: ImagesConfig, num_classes: int) -> None:
        self.config, self.num_classes = config, num_classes
        if config.root is None:
            raise RunError(
                f"data.root is not set: where {config.name} lies (val/, and train/ to train)"
            )
        where = Path(config.root)
        if config.form == "folder":
            where = _validation_folder(where, num_classes)
        self.images: Images = READERS[config.form](where)
        names = imagenet.check_classes(self.images, config.name, num_classes, str(where))
        self.class_names = names
        self.transform = create_transform(
            **common_transform(config),
            is_training=False,
            crop_pct=config.crop_pct,
            crop_mode=config.crop_mode,
        )

    @property
    def known_names(self) -> tuple[str, ...] | None:
        """Class names that the data state; None where they number their classes."""
        return imagenet.known_names(self.class_names, self.config.name, self.num_classes)

    @property
    def fingerprint(self) -> str:
        """Of the list of images, in order."""
        return self._digest(self.images)

    @staticmethod
    def _digest(*parts: Images) -> str:
        """SHA-256 of each image's name and label, without the folder where the data lie."""
        digest = hashlib.sha256()
        for images in parts:
            for index, label in enumerate(images.labels):
                digest.update(f"{Path(images.name(index)).name} {label}\n".encode())
        return digest.hexdigest()

    @property
    def num_train(self) -> int:
        """Training images: none were looked for."""
        return 0

    @property
    def num_test(self) -> int:
        """Validation images."""
        return len(self.images)

    @property
    def summary(self) -> dict[str, Any]:
        """Form and counts, for the record."""
        return {
            "form": self.config.form,
            "classes": len(self.class_names),
            "test_images_per_class": imagenet.images_per_class(
                self.images.labels, self.num_classes
            ),
        }

    @property
    def preparation(self) -> str:
        """What is done to an image, in words."""
        config = self.config
        side = math.floor(config.size / config.crop_pct)
        how = {"center": "short side", "squash": "both sides", "border": "long side"}
        mean, std = (" ".join(f"{v:.4g}" for v in values) for values in (config.mean, config.std))
        return (
            f"{how[config.crop_mode]} resized to {side} {config.interpolation}, center crop "
            f"{config.size}, mean {mean}, std {std}"
        )

    @property
    def marks(self) -> list[str]:
        """What must be said beside an accuracy on these images."""
        return imagenet.marks(self.config.name, self.num_classes, self.num_test)

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels, in order; of several processes each takes whole batches in turn.

        Batches are cut before they are shared out, so that every image meets the same
        neighbours, and gets the same bits, however many processes there are.
        """
        indices = range(self.num_test)
        batches = share_of([indices[i : i + size] for i in range(0, self.num_test, size)])
        loader = load(_Prepared(self.images, self.transform), batches, self.config.workers)
        for _ in batches:
            images, labels = next_batch(loader)
            yield images, labels

    def test_samples(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images of these numbers and their labels, read here and now."""
        prepared = _Prepared(self.images, self.transform)
        images, labels = zip(*(prepared[number] for number in numbers), strict=True)
        return torch.stack(images), torch.tensor(labels)


def common_transform(config: ImagesConfig) -> dict[str, Any]:
    """What training and evaluation share of timm's transform."""
    return {
        "input_size": (config.channels, config.size, config.size),
        "interpolation": config.interpolation,
        "mean": tuple(config.mean),
        "std": tuple(config.std),
    }


def _validation_folder(root: Path, num_classes: int) -> Path:
    """``root/val``, or ``root`` itself where it is that folder."""
    for name in FOLDERS:
        if (root / name).is_dir():
            return root / name
    if not root.is_dir():
        raise RunError(f"{root} is not a folder; data.form says how the images lie")
    folders = sorted(p.name for p in root.iterdir() if p.is_dir() and not is_hidden(p.name))
    if len(folders) == num_classes and "train" not in folders:
        return root
    raise RunError(
        f"{root} has no val/, nor {num_classes} class folders; it has {len(folders)} folders"
        + (f": {some(folders, LISTED)}" if folders else "")
    )

"""Labelled images, one at a time, wherever they lie."""

from __future__ import annotations

import tarfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO

from PIL import Image

from moh.data.pixels import open_picture
from moh.errors import RunError


class Images(ABC):
    """Images with their classes, read when asked for, by any number of processes.

    Attributes:
        labels: class of each image.
        class_names: one a class; None where the data number their classes and do not name them.
    """

    labels: Sequence[int]
    class_names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """Where an image lies, for people."""

    @abstractmethod
    def open(self, index: int) -> IO[bytes]:
        """The file of an image."""

    def image(self, index: int) -> Image.Image:
        """The image in RGB.

        Raises:
            RunError: it cannot be read; an image left out would move the score.
        """
        try:
            file = self.open(index)
        except (OSError, tarfile.TarError) as error:
            reason = str(error).splitlines()[0].replace(f"'{self.name(index)}'", "the file")
            raise RunError(f"cannot read image {self.name(index)}: {reason}") from None
        with file:
            return open_picture(file, self.name(index))
